// Curves: uPlot with the page's colours, a shared cursor, and smoothing.

import uPlot from "./vendor/uPlot.esm.js";
import { short } from "./dom.js";

// Okabe and Ito's colours, which differ for every common form of colour blindness.
export const COLOURS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#8a6d00", "#56b4e9", "#7a7a7a"];

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// A chart of one metric. series: [{ name, x, y, smooth }], x and y arrays. `told` is called with x and the series' values under the
// cursor, and with null where it left. Returns the chart, whose destroy() ends it.
export function drawCurves(place, series, { height = 186, sync = "steps", label = "", points = false, told = () => {} } = {}) {
  const xs = [...new Set(series.flatMap((one) => Array.from(one.x)))].sort((a, b) => a - b);
  const where = new Map(xs.map((x, i) => [x, i]));
  const data = [xs];
  const lines = [{}];
  const places = [];
  const single = xs.length < 2;
  series.forEach((one, k) => {
    const colour = COLOURS[(one.colour ?? k) % COLOURS.length];
    const spread = (values) => {
      const out = new Array(xs.length).fill(null);
      values.forEach((value, i) => (out[where.get(one.x[i])] = Number.isFinite(value) ? value : null));
      return out;
    };
    const raw = Array.from(one.y);
    if (one.smooth > 0 && raw.length > 2) {
      data.push(spread(raw), spread(smoothed(raw, one.smooth)));
      lines.push({ stroke: colour + "55", width: 1, points: { show: false }, spanGaps: true });
      lines.push({ stroke: colour, width: 2, points: { show: false }, spanGaps: true });
    } else {
      data.push(spread(raw));
      lines.push({ stroke: colour, width: 2, spanGaps: !points, points: { show: single || points, size: 5 } });
    }
    places.push(data.length - 1);
  });
  const axis = { stroke: css("--quiet"), grid: { stroke: css("--line"), width: 1 }, ticks: { stroke: css("--line"), width: 1 }, font: "11px system-ui, sans-serif" };
  const whole = xs.every(Number.isInteger);
  const options = {
    width: Math.max(place.clientWidth, 120),
    height,
    series: lines,
    legend: { show: false },
    cursor: { sync: { key: sync }, drag: { x: true, y: false }, points: { size: 6 } },
    scales: { x: { time: false }, y: { range: (_, low, high) => spanned(low, high) } },
    hooks: { setCursor: [({ cursor: { idx, left } }) => told(idx === null || idx === undefined || left < 0 ? null : { x: xs[idx], values: places.map((k) => data[k][idx]) })] },
    axes: [
      { ...axis, label, labelSize: 15, labelGap: 0, labelFont: axis.font, values: (_, ticks) => ticks.map((v) => (whole && !Number.isInteger(v) ? "" : String(Number(v.toPrecision(7))))), size: 28 },
      { ...axis, size: 66, values: (_, ticks) => ticks.map((v) => short(v)) },
    ],
  };
  return new uPlot(options, data, place);
}

// The steps that a chart was zoomed to; null: it shows all.
export function zoomOf({ scales: { x }, data: [xs] }) {
  return xs.length && (x.min > xs[0] || x.max < xs[xs.length - 1]) ? { min: x.min, max: x.max } : null;
}

// The ends of an axis; a curve that never changes has room above and below.
function spanned(low, high) {
  if (low !== high) return uPlot.rangeNum(low, high, 0.1, true);
  return low ? [low - Math.abs(low) / 10, low + Math.abs(low) / 10] : [0, 1];
}

// An exponential mean with a correction for its beginning; null where there is no number.
export function smoothed(values, share) {
  let [mean, weight] = [0, 0];
  return values.map((value) => {
    if (!Number.isFinite(value)) return null;
    mean = share * mean + (1 - share) * value;
    weight = share * weight + (1 - share);
    return mean / weight;
  });
}
