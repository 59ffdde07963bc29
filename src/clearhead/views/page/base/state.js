// What is chosen and what the pointer previews; who listens; and the address that says it all.

import { Data } from "./data.js";
import { allowedOf, allows, columnAt, difference, mapOf, rowAt, union, withoutSources } from "./rows.js";
import { sentence, visible } from "./text.js";

/**
 * @typedef {"linear" | "sqrt" | "log"} Scale
 * @typedef {{sample: number, entry: number, head: number, query: number, source: number | null,
 *   locked: boolean, scale: Scale, norm: "row" | "map", overview: "max" | "mean", side: Side,
 *   hide: "none" | "1" | "4" | "chosen", rows: "kept" | "scaled", zoom: Region | null, sort: string, least: number | null,
 *   theme: "auto" | "light" | "dark"}} State
 * @typedef {"this" | "other" | "difference"} Side
 * @typedef {[number, number, number, number]} Region first and last query (exclusive), then sources
 * @typedef {{query: number, source: number | null}} Pair
 */

const TRANSIENT = new Set(["preview"]);

export class Model {
  /** @param {import("./data.js").Source} source */
  constructor(source) {
    /** @type {import("./data.js").Header} */
    this.header = source.header;
    this.source = source;
    this.data = new Data(source, this.header.layers);
    const other = this.header.other;
    this.other = other ? new Data(source, other.layers, "other/") : null;
    /** @type {State} */
    this.state = {
      sample: 0, entry: 0, head: 0, query: 0, source: null, locked: false, scale: this.usualScale,
      norm: "map", overview: "max", side: other ? "difference" : "this", hide: "none", rows: "kept", zoom: null,
      sort: "layer", least: null, theme: "auto",
    };
    /** @type {Pair | null} */
    this.preview = null;
    /** @type {((changed: Set<string>) => void)[]} */
    this.listeners = [];
    /** @type {Set<string>} */
    this.changed = new Set();
    /** @type {(error: Error) => void} tells the reader what could not be read */
    this.report = () => {};
    this.state.query = this.lastQuery();
    if (source.hash) this.readHash();
  }

  /** @param {(changed: Set<string>) => void} listener */
  listen(listener) {
    this.listeners.push(listener);
  }

  /** @param {Partial<State>} patch */
  set(patch) {
    const state = /** @type {any} */ (this.state);
    for (const [key, value] of Object.entries({ ...this.fitted(patch.entry), ...patch })) {
      if (state[key] === value) continue;
      state[key] = value;
      this.tell(key);
    }
  }

  /** Head, query and source as far as another layer has them.
   * @param {number | undefined} entry
   * @returns {Partial<State>}
   */
  fitted(entry) {
    if (entry === undefined || entry === this.state.entry) return {};
    const { heads, queries, sources } = this.header.layers[entry];
    const { head, query, source } = this.state;
    return {
      zoom: null, head: head < heads.length ? head : 0,
      query: Math.max(0, Math.min(query, queries - 1)), source: source !== null && source < sources ? source : null,
    };
  }

  /** @param {Pair | null} pair */
  show(pair) {
    if (pair?.query === this.preview?.query && pair?.source === this.preview?.source) return;
    this.preview = pair;
    this.tell("preview");
  }

  /** Lock what the pointer or the keys are on.
   * @param {Pair} pair
   */
  lock(pair) {
    this.preview = null;
    this.set({ query: pair.query, source: pair.source, locked: true });
    this.tell("preview");
  }

  free() {
    this.preview = null;
    this.set({ locked: false, source: null });
    this.tell("preview");
  }

  /** @param {string} key */
  tell(key) {
    if (!this.changed.size) queueMicrotask(() => this.flush());
    this.changed.add(key);
  }

  flush() {
    const changed = this.changed;
    this.changed = new Set();
    for (const listener of this.listeners) listener(changed);
    if (this.source.hash && [...changed].some((key) => !TRANSIENT.has(key))) this.writeHash();
  }

  /** @returns {Scale} */
  get usualScale() {
    return this.header.kind === "mask" ? "linear" : "sqrt";
  }

  get entry() {
    return this.header.layers[this.state.entry];
  }

  /** What the page is about now: the previewed pair, unless one is locked. */
  get pair() {
    const { query, source, locked } = this.state;
    return (!locked && this.preview) || { query, source };
  }

  lastQuery() {
    const entry = this.entry;
    if (!entry) return 0;
    return entry.rows ? entry.rows[entry.rows.length - 1] ?? 0 : Math.max(0, entry.queries - 1);
  }

  /** Whether single weights or blocks of the chosen layer are held. */
  get drawn() {
    const entry = this.entry;
    const held = entry && (entry.encoding || entry.top || entry.cells || this.header.kind === "mask");
    return Boolean(held && entry.queries && entry.sources);
  }

  /** @param {number} query */
  positionOf(query) {
    const entry = this.entry;
    return entry.query_axis === entry.source_axis ? query + entry.offset : query;
  }

  /** The source at which "who looks at it" is asked: the chosen one, else the query's own. */
  watchedSource() {
    const { query, source } = this.pair;
    if (source !== null) return source;
    return Math.min(this.entry.sources - 1, Math.max(0, this.positionOf(query)));
  }

  /** @param {number} index of the axis @param {number} position */
  rawLabel(index, position) {
    return this.header.axes[index]?.labels?.[this.state.sample]?.[position] ?? null;
  }

  /** The call whose axes have the labels: the other record's where that one is shown. */
  get labelled() {
    const other = this.state.side === "other" && this.comparable ? this.header.other?.layers[this.state.entry] : null;
    return other ?? this.entry;
  }

  /** @param {number} query @param {number} [most] */
  queryLabel(query, most) {
    const position = this.positionOf(query);
    const raw = this.rawLabel(this.labelled.query_axis, position);
    return raw === null ? `#${position}` : visible(raw, most);
  }

  /** @param {number} source @param {number} [most] */
  sourceLabel(source, most) {
    const raw = this.rawLabel(this.labelled.source_axis, source);
    return raw === null ? `#${source}` : visible(raw, most);
  }

  /** @param {number} e @param {number} h */
  headName(e, h) {
    const entry = this.header.layers[e];
    const call = entry.call > 0 ? `(${entry.call})` : "";
    return `${entry.layer}${call}.${h < 0 ? "mean" : entry.heads[h]}`;
  }

  /** @param {Data} data @returns {import("./rows.js").Place} */
  at(data) {
    const { sample, entry, head } = this.state;
    return { data, s: sample, e: entry, h: head };
  }

  /** Whether the other record has the same layer, with the same heads and positions. */
  get comparable() {
    const one = this.entry;
    const other = this.header.other?.layers[this.state.entry];
    if (!one || !other) return false;
    const same = one.queries === other.queries && one.sources === other.sources;
    return same && String(one.heads) === String(other.heads) && String(one.rows) === String(other.rows);
  }

  /** The sides that count now, each with its sign. @returns {[Data, number][]} */
  sides() {
    const { side } = this.state;
    if (!this.other || side === "this" || !this.comparable) return [[this.data, 1]];
    if (side === "other") return [[this.other, 1]];
    return [[this.data, 1], [this.other, -1]];
  }

  /** @param {number} query */
  async row(query) {
    const without = this.leftOut();
    const [one, other] = await Promise.all(this.sides().map(async ([d]) => withoutSources(await rowAt(this.at(d), query), without)));
    return other ? difference(one, other) : one;
  }

  /** @param {number} source */
  async column(source) {
    const [one, other] = await Promise.all(this.sides().map(([d]) => columnAt(this.at(d), source, this.leftOut())));
    return one && other ? difference(one, other) : one;
  }

  /** All weights of what is chosen, of one side. @param {Data} data */
  matrix(data) {
    return mapOf(this.at(data), this.leftOut());
  }

  /** The runs of sources that a query may attend to, on any side that is shown. @param {number} query */
  async allowed(query) {
    const { sample, entry } = this.state;
    const runs = await Promise.all(this.sides().map(async ([data]) => allowedOf(await data.runs(sample, entry), data, entry, query)));
    return runs.reduce(union);
  }

  /**
   * Why an edge is allowed or blocked: the mask's own words, or what each of its parts says.
   * @param {number} query
   * @param {number} source
   * @returns {Promise<string[]>}
   */
  async reasons(query, source) {
    const { sample, entry: e } = this.state;
    const { parts, why } = this.entry;
    const text = async (/** @type {string} */ name) => JSON.parse(new TextDecoder().decode(await this.source.chunk(name)));
    if (this.header.live && this.entry.mask) return (await text(`why/${sample}/${e}/${query}/${source}`)).map((/** @type {string} */ words) => sentence(words));
    if (why) {
      const all = await this.data.kept.get(`why/${sample}/${e}`, () => text(why.replace("/0/", `/${sample}/`)), () => 1e6);
      return all[query][source].map((/** @type {string} */ words) => sentence(words));
    }
    return Promise.all((parts ?? []).map(async ({ name, mask }) => {
      const open = allows(await this.data.runsOf(mask, sample), this.data, e, query, source);
      return `${sentence(name, 120)} ${open ? "allows" : "blocks"} it`;
    }));
  }

  /** The sources that are hidden. */
  hidden() {
    const { hide, source } = this.state;
    if (hide === "chosen") return new Set(source === null ? [] : [source]);
    const many = hide === "none" ? 0 : Number(hide);
    return new Set(Array.from({ length: Math.min(many, this.entry.sources) }, (_, i) => i));
  }

  /** Whether whole rows are held, which can be scaled. */
  get wholeRows() {
    return Boolean(this.entry.encoding || this.entry.live);
  }

  /** The sources without which rows sum to 1 again. @returns {Set<number>} */
  leftOut() {
    return this.state.rows === "scaled" && this.wholeRows ? this.hidden() : new Set();
  }

  /** The address was changed by hand, or by the way back. */
  followHash() {
    this.readHash();
    for (const key of Object.keys(this.state)) this.tell(key);
  }

  writeHash() {
    const { sample, head, query, source, locked, zoom, entry: e, ...rest } = this.state;
    const entry = this.entry;
    if (!entry) return;
    const words = new URLSearchParams();
    words.set("layer", entry.call > 0 ? `${entry.layer}.${entry.call}` : String(entry.layer));
    words.set("head", head < 0 ? "mean" : String(entry.heads[head]));
    if (sample) words.set("sample", String(sample));
    if (locked) words.set("query", String(query));
    if (locked && source !== null) words.set("source", String(source));
    if (zoom) words.set("zoom", zoom.join("-"));
    const usual = { scale: this.usualScale, norm: "map", overview: "max", side: this.other ? "difference" : "this", hide: "none", rows: "kept", sort: "layer", least: null, theme: "auto" };
    for (const [key, value] of Object.entries(rest)) {
      if (value !== /** @type {any} */ (usual)[key]) words.set(key, String(value));
    }
    try {
      history.replaceState(null, "", `#${words}`);
    } catch {
      this.source.hash = false; // a sandboxed frame has no address of its own
    }
  }

  readHash() {
    const words = new URLSearchParams(location.hash.slice(1));
    const { state } = this;
    const [layer, call = "0"] = (words.get("layer") ?? "").split(".");
    const e = this.header.layers.findIndex((entry) => String(entry.layer) === layer && String(entry.call) === call);
    if (e >= 0) state.entry = e;
    const heads = this.entry?.heads ?? [];
    const head = words.get("head");
    if (head === "mean") state.head = -1;
    else if (head !== null && heads.includes(Number(head))) state.head = heads.indexOf(Number(head));
    state.sample = within(words.get("sample"), this.header.samples) ?? 0;
    state.query = within(words.get("query"), this.entry?.queries ?? 0) ?? this.lastQuery();
    state.source = within(words.get("source"), this.entry?.sources ?? 0);
    state.locked = words.has("query");
    oneOf(words, state, "scale", ["linear", "sqrt", "log"]);
    oneOf(words, state, "norm", ["row", "map"]);
    oneOf(words, state, "overview", ["max", "mean"]);
    oneOf(words, state, "hide", ["none", "1", "4", "chosen"]);
    oneOf(words, state, "rows", ["kept", "scaled"]);
    oneOf(words, state, "theme", ["auto", "light", "dark"]);
    if (this.other) oneOf(words, state, "side", ["this", "other", "difference"]);
    oneOf(words, state, "sort", this.header.statistics.map(({ name }) => name));
    state.least = words.has("least") && Number.isFinite(Number(words.get("least"))) ? Number(words.get("least")) : null;
    state.zoom = this.readZoom(words.get("zoom"));
  }

  /** @param {string | null} text @returns {Region | null} */
  readZoom(text) {
    const numbers = (text ?? "").split("-").map(Number);
    if (numbers.length !== 4 || !this.entry) return null;
    const [q0, q1, s0, s1] = numbers;
    const fits = q0 >= 0 && q0 < q1 && q1 <= this.entry.queries && s0 >= 0 && s0 < s1 && s1 <= this.entry.sources;
    return fits && numbers.every(Number.isInteger) ? [q0, q1, s0, s1] : null;
  }
}

/**
 * @param {string | null} text
 * @param {number} stop
 */
function within(text, stop) {
  if (text === null || !/^\d+$/.test(text)) return null;
  return Number(text) < stop ? Number(text) : null;
}

/**
 * @param {URLSearchParams} words
 * @param {any} state
 * @param {string} key
 * @param {string[]} values
 */
function oneOf(words, state, key, values) {
  const value = words.get(key);
  if (value !== null && values.includes(value)) state[key] = value;
}
