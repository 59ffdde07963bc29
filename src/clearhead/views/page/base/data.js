// The chunks of a record: asked for when needed, decoded once, forgotten when memory is short.

/**
 * @typedef {{name: string, labels: string[][] | null, ids?: number[][], raw?: string[][],
 *   segments?: [number, number, string][], prompt?: number, grid?: [number, number]}} Axis
 * @typedef {{layer: number, module: string, call: number, kind: string, heads: number[],
 *   queries: number, sources: number, query_axis: number, source_axis: number,
 *   rows: number[] | null, offset: number, mask: string | null, check: number | null,
 *   encoding: "f32" | "log8" | null, steps?: number, top: number, cells: number, sums: boolean,
 *   top_encoding?: "f32" | "f16" | "log8" | "planes", top_steps?: number, live?: boolean,
 *   parts?: MaskPart[], why?: string | null, roles?: string[][]}} Entry
 * @typedef {{name: string, label: string, unit: string, definition: string, paper: string}} Statistic
 * @typedef {{sample: number | null, query: number | null, source: number | null,
 *   layer: number | null, head: number | null, weight: number, effect: number, metric: string,
 *   where?: string}} Effect
 * @typedef {{name: string, mask: string}} MaskPart
 * @typedef {{schema: string, version: number, kind?: "attention" | "mask" | "atlas", title: string,
 *   made_by: string, notes: string[], holds: string[], samples: number, axes: Axis[],
 *   layers: Entry[], statistics: Statistic[], effects: Effect[], chunks: Record<string, number>,
 *   live?: boolean,
 *   other?: {title: string, name: string, other_name: string, layers: Entry[]}}} Header
 * @typedef {{header: any, chunk(name: string): Promise<Uint8Array>, hash?: boolean}} Source
 * @typedef {{values: Float32Array, known: Uint8Array | null, sum: number, about: boolean,
 *   held: "all" | "top" | "none", left?: number}} Row
 * @typedef {{sources: Uint32Array, weights: Float32Array, each: number, rows: number}} Top
 * @typedef {{mean: Float32Array, max: Float32Array, rows: number, columns: number}} Blocks
 * @typedef {{start: Uint32Array, runs: Uint32Array}} Runs
 */

const MEMORY = 160e6;

/** Values that are made once and kept while there is room, the least recently used leaving first. */
class Kept {
  /** @type {Map<string, {value: Promise<any>, bytes: number}>} */
  entries = new Map();
  bytes = 0;

  /**
   * @template T
   * @param {string} name
   * @param {() => Promise<T>} make
   * @param {(value: T) => number} bytesOf
   * @returns {Promise<T>}
   */
  get(name, make, bytesOf) {
    const found = this.entries.get(name);
    if (found) {
      this.entries.delete(name);
      this.entries.set(name, found);
      return found.value;
    }
    const entry = { value: make(), bytes: 0 };
    this.entries.set(name, entry);
    entry.value.then(
      (value) => this.weigh(entry, bytesOf(/** @type {any} */ (value))),
      () => this.entries.delete(name),
    );
    return /** @type {Promise<T>} */ (entry.value);
  }

  /**
   * @param {{bytes: number}} entry
   * @param {number} bytes
   */
  weigh(entry, bytes) {
    entry.bytes = bytes;
    this.bytes += bytes;
    for (const [name, oldest] of this.entries) {
      if (this.bytes <= MEMORY) return;
      if (oldest === entry || !oldest.bytes) continue;
      this.entries.delete(name);
      this.bytes -= oldest.bytes;
    }
  }
}

/** The weights of log codes: 0 is zero, 255 is NaN, code c is 2 ** (-(c - 1) / steps).
 * @param {number} steps
 */
function codeWeights(steps) {
  const weights = new Float32Array(256);
  for (let code = 1; code < 255; code++) weights[code] = 2 ** (-(code - 1) / steps);
  weights[255] = NaN;
  return weights;
}

/**
 * @param {Uint8Array} bytes
 * @param {number} steps
 */
function decodeLog(bytes, steps) {
  const weights = codeWeights(steps);
  return Float32Array.from(bytes, (code) => weights[code]);
}

/** @param {Uint8Array} bytes */
function decodeFloat32(bytes) {
  return new Float32Array(bytes.slice().buffer, 0, bytes.byteLength >> 2);
}

/** @param {Uint8Array} bytes */
function decodeFloat16(bytes) {
  const values = new Float32Array(bytes.byteLength >> 1);
  for (let i = 0; i < values.length; i++) {
    const half = bytes[2 * i] | (bytes[2 * i + 1] << 8);
    const exponent = (half >> 10) & 31;
    const fraction = half & 1023;
    const size =
      exponent === 0
        ? fraction * 2 ** -24
        : exponent === 31
          ? fraction ? NaN : Infinity
          : (1 + fraction / 1024) * 2 ** (exponent - 15);
    values[i] = half & 0x8000 ? -size : size;
  }
  return values;
}

/**
 * Largest weights a row: sources (none is 2 ** 32 - 1) and their weights.
 * @param {Uint8Array} bytes
 * @param {Entry} entry
 * @returns {Top}
 */
export function decodeTop(bytes, entry) {
  const rows = entry.rows ? entry.rows.length : entry.queries;
  const each = entry.top;
  const wide = entry.sources > 65535 ? 4 : 2;
  const cells = rows * each;
  const after = bytes.subarray(cells * wide);
  const steps = entry.top_steps ?? 16;
  if (entry.top_encoding === "planes") return topOfPlanes(bytes, rows, each, wide, steps);
  const sources = new Uint32Array(cells);
  const none = wide === 2 ? 0xffff : 0xffffffff;
  for (let i = 0; i < cells; i++) {
    let source = 0;
    for (let byte = wide - 1; byte >= 0; byte--) source = source * 256 + bytes[i * wide + byte];
    sources[i] = source === none ? 0xffffffff : source;
  }
  const weights =
    entry.top_encoding === "log8"
      ? decodeLog(after, steps)
      : entry.top_encoding === "f32" ? decodeFloat32(after) : decodeFloat16(after);
  return { sources, weights, each, rows };
}

/**
 * Planes of bytes, each (top, rows): the first differences of the sources of a row in ascending
 * order, lowest byte first, then the log codes; code 0 is an entry that is not there.
 * @param {Uint8Array} bytes
 * @param {number} rows
 * @param {number} each
 * @param {number} wide
 * @param {number} steps
 * @returns {Top}
 */
function topOfPlanes(bytes, rows, each, wide, steps) {
  const cells = rows * each;
  const sources = new Uint32Array(cells);
  const weights = new Float32Array(cells);
  const table = codeWeights(steps);
  for (let row = 0; row < rows; row++) {
    let source = 0;
    for (let k = 0; k < each; k++) {
      const at = k * rows + row;
      let difference = 0;
      for (let byte = wide - 1; byte >= 0; byte--) difference = difference * 256 + bytes[byte * cells + at];
      source += difference;
      const code = bytes[wide * cells + at];
      sources[row * each + k] = code ? source : 0xffffffff;
      weights[row * each + k] = table[code];
    }
  }
  return { sources, weights, each, rows };
}

/**
 * @param {Uint8Array} bytes
 * @returns {Runs}
 */
export function decodeRuns(bytes) {
  const numbers = new Uint32Array(bytes.slice().buffer, 0, bytes.byteLength >> 2);
  let rows = 0;
  for (let i = 0; i < numbers.length; i += 1 + 2 * numbers[i]) rows += 1;
  const start = new Uint32Array(rows + 1);
  const runs = new Uint32Array(Math.max(0, numbers.length - rows));
  for (let row = 0, i = 0; row < rows; row++) {
    const many = 2 * numbers[i];
    runs.set(numbers.subarray(i + 1, i + 1 + many), start[row]);
    start[row + 1] = start[row] + many;
    i += 1 + many;
  }
  return { start, runs };
}

/** Where cell `index` of `cells` begins when `length` positions are split as evenly as can be,
 * the first ones larger (as torch.tensor_split does).
 * @param {number} index
 * @param {number} length
 * @param {number} cells
 */
export function cellStart(index, length, cells) {
  return index * Math.floor(length / cells) + Math.min(index, length % cells);
}

/**
 * @param {number} position
 * @param {number} length
 * @param {number} cells
 */
export function cellOf(position, length, cells) {
  const least = Math.floor(length / cells);
  const larger = length % cells;
  const border = larger * (least + 1);
  return position < border
    ? Math.floor(position / (least + 1))
    : larger + Math.floor((position - border) / least);
}

/** One record, of the two that may be compared. */
export class Data {
  /**
   * @param {Source} source
   * @param {Entry[]} entries
   * @param {string} prefix of the names of its chunks
   */
  constructor(source, entries, prefix = "") {
    this.source = source;
    this.entries = entries;
    this.prefix = prefix;
    this.kept = new Kept();
    /** @type {Map<Entry, Map<number, number>>} */
    this.rowsOf = new Map();
  }

  /**
   * @template {object} T
   * @param {string} name
   * @param {(bytes: Uint8Array) => T} decode
   * @param {(value: T) => number} bytesOf
   */
  chunk(name, decode, bytesOf) {
    const make = async () => decode(await this.source.chunk(this.prefix + name));
    return this.kept.get(name, make, bytesOf);
  }

  /** The row of a chunk that holds a query, or -1.
   * @param {Entry} entry
   * @param {number} query
   */
  rowOf(entry, query) {
    if (!entry.rows) return query < entry.queries ? query : -1;
    let index = this.rowsOf.get(entry);
    if (!index) {
      index = new Map(entry.rows.map((q, row) => [q, row]));
      this.rowsOf.set(entry, index);
    }
    return index.get(query) ?? -1;
  }

  /**
   * @param {number} s sample
   * @param {number} e entry
   * @param {number} h index of the head
   */
  full(s, e, h) {
    const { encoding, steps } = this.entries[e];
    const decode = (/** @type {Uint8Array} */ bytes) =>
      encoding === "f32" ? decodeFloat32(bytes) : decodeLog(bytes, steps ?? 16);
    return this.chunk(`full/${s}/${e}/${h}`, decode, (v) => v.byteLength);
  }

  /** All weights of one head, or the mean of all heads of the layer (h = -1).
   * @param {number} s
   * @param {number} e
   * @param {number} h
   * @returns {Promise<Float32Array>}
   */
  matrix(s, e, h) {
    const heads = this.entries[e].heads.length;
    if (h >= 0 || heads === 1) return this.full(s, e, Math.max(h, 0));
    const make = async () => {
      const mean = new Float32Array(await this.full(s, e, 0));
      for (let other = 1; other < heads; other++) {
        const next = await this.full(s, e, other);
        for (let i = 0; i < mean.length; i++) mean[i] += next[i];
      }
      return mean.map((sum) => sum / heads);
    };
    return this.kept.get(`mean/${s}/${e}`, make, (v) => v.byteLength);
  }

  /**
   * @param {number} s
   * @param {number} e
   * @param {number} h
   */
  top(s, e, h) {
    return this.chunk(
      `top/${s}/${e}/${h}`,
      (bytes) => decodeTop(bytes, this.entries[e]),
      (v) => v.sources.byteLength + v.weights.byteLength,
    );
  }

  /**
   * @param {number} s
   * @param {number} e
   * @param {number} h
   * @returns {Promise<Blocks>}
   */
  blocks(s, e, h) {
    const entry = this.entries[e];
    const rows = Math.min(entry.cells, entry.queries);
    const columns = Math.min(entry.cells, entry.sources);
    const decode = (/** @type {Uint8Array} */ bytes) => {
      const values = decodeLog(bytes, 16);
      const half = rows * columns;
      return { mean: values.subarray(0, half), max: values.subarray(half), rows, columns };
    };
    if (h >= 0) return this.chunk(`block/${s}/${e}/${h}`, decode, () => 8 * rows * columns);
    const make = async () => {
      const all = await Promise.all(entry.heads.map((_, i) => this.blocks(s, e, i)));
      const mean = new Float32Array(rows * columns);
      const max = new Float32Array(rows * columns);
      for (const one of all) {
        for (let i = 0; i < mean.length; i++) {
          mean[i] += one.mean[i] / all.length;
          max[i] += one.max[i] / all.length;
        }
      }
      return { mean, max, rows, columns };
    };
    return this.kept.get(`blocks/${s}/${e}`, make, () => 8 * rows * columns);
  }

  /**
   * @param {number} s
   * @param {number} e
   * @param {number} h
   */
  sums(s, e, h) {
    return this.chunk(`sums/${s}/${e}/${h}`, decodeFloat32, (v) => v.byteLength);
  }

  /** The allowed runs of every row, or null where everything is allowed.
   * @param {number} s
   * @param {number} e
   * @returns {Promise<Runs | null>}
   */
  runs(s, e) {
    const name = this.entries[e].mask;
    if (!name) return Promise.resolve(null);
    return this.runsOf(name, s);
  }

  /** The runs of a mask or of a part of one. @param {string} name of the chunk of sample 0 @param {number} s */
  runsOf(name, s) {
    return this.chunk(name.replace(/^(\w+)\/\d+\//, `$1/${s}/`), decodeRuns, (v) => v.runs.byteLength + v.start.byteLength);
  }
}
