// Packs: JSON with raw columns behind it (whet/view/pack.py), as typed arrays over the bytes that came.

const ARRAYS = { f8: Float64Array, f4: Float32Array, i4: Int32Array, i1: Int8Array, u1: Uint8Array };

export function readPack(buffer) {
  const size = new DataView(buffer).getUint32(0, true);
  const head = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, size)));
  const columns = {};
  for (const [name, [kind, start, length]] of Object.entries(head.columns)) columns[name] = new ARRAYS[kind](buffer, 4 + size + start, length);
  return { head, columns };
}

// Texts of tokens: whole UTF-8 as letters, other bytes as escapes.
export class Pieces {
  constructor(columns) {
    this.has = "piece" in columns;
    if (!this.has) return;
    const { piece_ends: ends, piece_bytes: bytes, piece_known: known } = columns;
    this.places = columns.piece;
    this.bytes = Array.from(ends, (end, i) => (known[i] ? bytes.subarray(i ? ends[i - 1] : 0, end) : null));
    this.texts = this.bytes.map((each) => (each === null ? null : textOfBytes(each)));
  }

  // The text of the token at a place among all samples' tokens; null: none is known.
  text(place) {
    return this.has ? this.texts[this.places[place]] : null;
  }

  // The text of a stretch of tokens, with letters that several tokens share put together.
  join(from, to) {
    if (!this.has) return null;
    const parts = [];
    let size = 0;
    for (let i = from; i < to; i++) {
      const bytes = this.bytes[this.places[i]] ?? new Uint8Array();
      parts.push(bytes);
      size += bytes.length;
    }
    const whole = new Uint8Array(size);
    let at = 0;
    for (const part of parts) {
      whole.set(part, at);
      at += part.length;
    }
    return textOfBytes(whole);
  }
}

const STRICT = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true });

export function textOfBytes(bytes) {
  try {
    return STRICT.decode(bytes);
  } catch {
    let out = "";
    for (let i = 0; i < bytes.length; ) {
      const length = bytes[i] < 0x80 ? 1 : bytes[i] >= 0xf0 ? 4 : bytes[i] >= 0xe0 ? 3 : 2;
      try {
        out += STRICT.decode(bytes.subarray(i, Math.min(i + length, bytes.length)));
        i += length;
      } catch {
        out += "\\x" + bytes[i].toString(16).padStart(2, "0");
        i += 1;
      }
    }
    return out;
  }
}
