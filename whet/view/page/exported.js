// The page of one exported trajectory: its data are in the file itself.

import { el, fill } from "./dom.js";
import { readPack } from "./pack.js";
import { readTrajectory, trajectoryView } from "./trajectory.js";
import { setLanguage, t } from "./words.js";

async function unpacked(name) {
  const text = document.getElementById(`pack-${name}`)?.textContent;
  if (!text) return null;
  const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return readPack(await new Response(stream).arrayBuffer());
}

async function showExported() {
  let language = document.documentElement.lang.startsWith("zh") ? "zh" : "en";
  const trajectory = readTrajectory(await unpacked("trajectory"));
  const credit = await unpacked("credit");
  let state = {};
  const main = document.getElementById("main");
  const show = () => {
    setLanguage(language);
    const other = el("button", { type: "button", class: "quiet", onclick: () => ((language = language === "en" ? "zh" : "en"), show()) }, language === "en" ? "中文" : "English");
    const words = el("p", { class: "note" }, t("Exported by whet from the run {0}.", trajectory.head.run));
    const page = trajectoryView(trajectory, credit, state, (changed, again) => ((state = changed), again && show()), [other]);
    fill(main, page, words);
    page.ready();
  };
  show();
}

showExported();
