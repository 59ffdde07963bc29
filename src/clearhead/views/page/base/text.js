// What is written: token labels in which everything is visible, and numbers in words.
// Token text is data: it reaches the document as text nodes only, cut to a readable length.

const BLANKS = new Map([
  [" ", "␣"],
  ["\n", "⏎"],
  ["\t", "⇥"],
  ["\x7f", "␡"],
]);
const MARKS_IN_A_ROW = 3;

/**
 * A token with everything visible, at most `most` characters.
 * @param {string} token
 * @param {number} [most]
 */
export function visible(token, most = 24) {
  let text = token;
  if (text.startsWith("\u2068") && text.endsWith("\u2069")) text = text.slice(1, -1);
  if (text === "") return "∅";
  // A character takes at most two units; marks that are left out take some more.
  const characters = Array.from(text.slice(0, most * 8));
  let shown = "";
  let length = 0;
  let marks = 0;
  for (let i = 0; i < characters.length; i++) {
    const character = characters[i];
    const mark = /\p{M}/u.test(character);
    marks = mark ? marks + 1 : 0;
    if (marks > MARKS_IN_A_ROW) continue;
    if (length === most) return shown + "…";
    if (mark && i === 0) shown += "◌";
    shown += joins(characters, i) ? character : symbol(character);
    length += mark ? 0 : 1;
  }
  return text.length > most * 8 ? shown + "…" : shown;
}

/**
 * A sentence or a title: as a token, but spaces and line ends stay spaces.
 * @param {string} text
 * @param {number} [most]
 */
export function sentence(text, most = 400) {
  return visible(text.slice(0, 8 * most).replace(/\s+/g, " "), most).replaceAll("␣", " ");
}

/**
 * Whether a zero-width joiner joins two pictures.
 * @param {string[]} characters
 * @param {number} i
 */
function joins(characters, i) {
  if (characters[i] !== "\u200d") return false;
  const picture = /\p{Extended_Pictographic}/u;
  const before = characters[i - 1] === "\ufe0f" ? characters[i - 2] : characters[i - 1];
  return picture.test(before ?? "") && picture.test(characters[i + 1] ?? "");
}

/** @param {string} character */
function symbol(character) {
  const blank = BLANKS.get(character);
  if (blank) return blank;
  const code = /** @type {number} */ (character.codePointAt(0));
  if (code < 32) return String.fromCodePoint(0x2400 + code);
  if (/[\p{C}\p{Z}]/u.test(character)) {
    return `<U+${code.toString(16).toUpperCase().padStart(4, "0")}>`;
  }
  return character;
}

/**
 * A weight in words: three digits that matter, "≈" where the stored code is coarse.
 * @param {number} value
 * @param {boolean} [about]
 */
export function number(value, about = false) {
  if (Number.isNaN(value)) return "NaN";
  if (!Number.isFinite(value)) return value > 0 ? "∞" : "−∞";
  if (value === 0) return "0";
  const size = Math.abs(value);
  let text;
  if (size >= 100) text = value.toFixed(0);
  else if (size >= 0.0995) text = value.toPrecision(about ? 2 : 3);
  else if (size >= 1e-5) text = value.toPrecision(2);
  else text = value.toExponential(1);
  return (about ? "≈" : "") + text.replace("-", "−");
}

/** @param {number} value */
export function signed(value) {
  return (value > 0 ? "+" : "") + number(value);
}

/** @param {number} bytes */
export function size(bytes) {
  if (bytes < 1000) return `${bytes} bytes`;
  if (bytes < 1e6) return `${(bytes / 1000).toFixed(0)} kB`;
  return `${(bytes / 1e6).toFixed(1)} MB`;
}

/**
 * @param {number} n
 * @param {string} one
 * @param {string} [many]
 */
export function count(n, one, many = one + "s") {
  return `${n.toLocaleString("en")} ${n === 1 ? one : many}`;
}
