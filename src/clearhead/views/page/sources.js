// Where the header and the chunks come from: this file, a server, or a notebook's kernel.

/** @typedef {import("./base/data.js").Source} Source */

const ALPHABET =
  "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789!#$%&()*+,./:;-=>?@[]^_`{|}~\"";

/** 13 bits in two characters; the length in bytes stands before a space.
 * @param {string} text
 */
export function fromBase91(text) {
  const space = text.indexOf(" ");
  const bytes = new Uint8Array(Number(text.slice(0, space)));
  const digits = new Uint8Array(128);
  for (let i = 0; i < ALPHABET.length; i++) digits[ALPHABET.charCodeAt(i)] = i;
  let bits = 0;
  let held = 0;
  let at = 0;
  for (let i = space + 1; i + 1 < text.length; i += 2) {
    bits = (bits << 13) | (digits[text.charCodeAt(i)] * 91 + digits[text.charCodeAt(i + 1)]);
    held += 13;
    while (held >= 8 && at < bytes.length) {
      held -= 8;
      bytes[at++] = (bits >> held) & 255;
    }
    bits &= (1 << held) - 1;
  }
  return bytes;
}

/** @param {string} text */
function fromBase64(text) {
  return Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
}

/** @param {Uint8Array} bytes */
async function inflated(bytes) {
  const stream = new Blob([/** @type {any} */ (bytes)]).stream().pipeThrough(new DecompressionStream("deflate-raw"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

/** The source of a page that holds everything itself. @returns {Source} */
export function fromDocument() {
  const header = JSON.parse(document.getElementById("clearhead-header")?.textContent ?? "{}");
  /** @type {Map<string, Element>} */
  const blocks = new Map();
  for (const block of document.querySelectorAll("script[data-chunk]")) {
    blocks.set(/** @type {HTMLElement} */ (block).dataset.chunk ?? "", block);
  }
  const chunk = async (/** @type {string} */ name) => {
    const block = blocks.get(name);
    if (!block) throw new Error(`this page does not hold ${name}`);
    const text = block.textContent ?? "";
    const packed = /** @type {HTMLElement} */ (block).dataset.encoding === "base91" ? fromBase91(text) : fromBase64(text);
    return inflated(packed);
  };
  return { header, chunk, hash: true };
}

/** The source of a served page. @returns {Promise<Source>} */
export async function fromServer() {
  const get = async (/** @type {string} */ path) => {
    const answer = await fetch(path).catch(() => { throw new Error("the server does not answer: was it stopped?"); });
    if (!answer.ok) throw new Error(`${path}: ${answer.status}`);
    return answer;
  };
  const header = await (await get("header")).json();
  const chunk = async (/** @type {string} */ name) => new Uint8Array(await (await get(`chunk/${name}`)).arrayBuffer());
  return { header, chunk, hash: true };
}

/** The source of a notebook's widget: its kernel answers messages. @param {any} model @returns {Source} */
export function fromKernel(model) {
  /** @type {Map<number, {resolve: (bytes: Uint8Array) => void, reject: (error: Error) => void}>} */
  const waiting = new Map();
  let last = 0;
  model.on("msg:custom", (/** @type {any} */ message, /** @type {DataView[]} */ buffers) => {
    const asked = waiting.get(message.id);
    if (!asked) return;
    waiting.delete(message.id);
    if (message.error) asked.reject(new Error(message.error));
    else asked.resolve(new Uint8Array(buffers[0].buffer, buffers[0].byteOffset, buffers[0].byteLength));
  });
  const chunk = (/** @type {string} */ name) => new Promise((resolve, reject) => {
    last += 1;
    waiting.set(last, { resolve, reject });
    model.send({ chunk: name, id: last });
  });
  return { header: model.get("header"), chunk: /** @type {any} */ (chunk) };
}
