// The page: puts the parts together. `mount` serves the file, the server and the notebook.

import { button, element, fill } from "./base/dom.js";
import { isAllowed } from "./base/rows.js";
import { Model } from "./base/state.js";
import { count, number, sentence, size, visible } from "./base/text.js";
import { buildChoices, buildHelp, buildLegend, buildMapTools, buildSearch } from "./parts/controls.js";
import { HeadsView } from "./parts/heads.js";
import { MapView } from "./parts/map.js";
import { QuestionView, headWords } from "./parts/question.js";
import { StripView } from "./parts/strip.js";
import { AtlasView, segmentTable } from "./parts/tables.js";
import { WhyView } from "./parts/why.js";

const SCHEMA = "clearhead.view";
const VERSION = 1;
const CAUTION =
  "Weight is not effect: a head can read a token strongly and change nothing. To test it, cut the edge with clearhead.knockout and compare the outputs, or rank many edges with clearhead.effects.";

/**
 * Show a record inside of `host`, in a shadow root of its own.
 * @param {HTMLElement} host
 * @param {import("./base/data.js").Source} source
 * @param {string} style the text of page.css
 */
export function mount(host, source, style) {
  const shadow = host.shadowRoot ?? host.attachShadow({ mode: "open" });
  const sheet = new CSSStyleSheet();
  sheet.replaceSync(style);
  shadow.adoptedStyleSheets = [sheet];
  const { header } = source;
  if (header?.schema !== SCHEMA || header.version !== VERSION) {
    const got = visible(`${header?.schema ?? "none"} ${header?.version ?? ""}`, 60);
    shadow.replaceChildren(element("p", { role: "alert" }, `This page reads ${SCHEMA} version ${VERSION}; the record is ${got}.`));
    return null;
  }
  const page = new Page(host, new Model(source));
  shadow.replaceChildren(page.root);
  page.start();
  return page;
}

class Page {
  /**
   * @param {HTMLElement} host
   * @param {Model} model
   */
  constructor(host, model) {
    this.host = host;
    this.model = model;
    const dark = () => this.dark;
    this.system = matchMedia("(prefers-color-scheme: dark)");
    this.isMask = model.header.kind === "mask";
    this.map = new MapView(model, dark);
    this.strip = new StripView(model, dark);
    this.heads = new HeadsView(model, dark);
    this.questions = this.isMask ? null : new QuestionView(model);
    this.why = this.isMask ? new WhyView(model) : null;
    this.atlas = model.header.statistics.length ? new AtlasView(model, this.heads, dark) : null;
    this.choices = element("div", { class: "tools" });
    this.mapTools = element("div", { class: "tools" });
    this.legend = element("p", { class: "legend" });
    this.readout = element("p", { class: "readout", role: "status" });
    this.segments = element("div", { class: "scroll" });
    this.help = buildHelp();
    this.search = buildSearch(model, (pair) => this.choose(pair));
    this.turn = 0;
    this.root = element("main", { class: "page" });
  }

  get dark() {
    const { theme } = this.model.state;
    return theme === "auto" ? this.system.matches : theme === "dark";
  }

  start() {
    const { model } = this;
    this.applyTheme();
    fill(this.root, this.head(), model.entry ? this.body() : element("p", { class: "card" }, "This record holds no layers."), this.about(), this.help);
    const listener = model.source.hash ? document : this.root;
    listener.addEventListener("keydown", (event) => this.onKey(/** @type {KeyboardEvent} */ (event)));
    addEventListener("beforeprint", () => this.heads.paintAll());
    this.system.addEventListener("change", () => this.recolour());
    if (!model.entry) return;
    model.report = (error) => { this.readout.textContent = `A part of the record could not be read: ${sentence(String(error.message), 200)}`; };
    if (model.source.hash) addEventListener("hashchange", () => model.followHash());
    this.atlas?.root.addEventListener("chosen", () => { if (model.drawn) this.map.root.scrollIntoView({ block: "center" }); });
    this.map.root.addEventListener("said", (event) => { this.readout.textContent = /** @type {CustomEvent} */ (event).detail; });
    this.map.painted.push(() => buildLegend(this.map, this.dark, this.legend));
    model.listen((changed) => this.onChange(changed));
    this.buildControls();
    this.strip.build();
    void this.showPair().then(() => this.strip.revealQuery()).catch(model.report);
    void this.showSegments().catch(model.report);
    this.heads.build();
    void this.heads.load().then(() => this.atlas?.build()).catch(model.report);
  }

  head() {
    const { header, entry } = this.model;
    const heads = header.layers.reduce((sum, { heads: some }) => sum + some.length, 0);
    const facts = entry ? `${count(header.layers.length, "layer")} · ${count(heads, "head")}` + (this.model.drawn ? ` · ${count(entry.queries, "query", "queries")} × ${count(entry.sources, "source")}` : "") : "";
    return element("header", { class: "top" },
      element("div", null, element("h1", null, element("bdi", null, sentence(header.title || "Attention", 120))), element("p", { class: "under" }, this.isMask ? (entry ? `${count(entry.queries, "query", "queries")} × ${count(entry.sources, "source")}` : "") : facts)),
      element("div", { class: "buttons" },
        button("◐", () => this.toggleTheme(), { "aria-label": "Light or dark", title: "Light or dark (t)" }),
        button("?", () => this.help.showModal(), { "aria-label": "Help", title: "Help (?)" })));
  }

  body() {
    const { model } = this;
    const drawn = model.header.layers.some((e) => e.encoding || e.top || e.cells) || this.isMask;
    const untrained = model.header.notes.filter((note) => /untrained/i.test(note));
    const maps = drawn ? [
      element("nav", { class: "bar", "aria-label": "What is shown" }, this.choices, this.search.root),
      untrained.map((note) => element("p", { class: "card said" }, sentence(note))),
      element("div", { class: "columns" },
        element("div", { class: "left" },
          element("section", { class: "card", "aria-label": "Tokens" }, this.strip.root),
          element("section", { class: "card", "aria-label": "Map" }, this.mapTools, this.map.root, this.readout, this.legend, this.isMask ? null : element("p", { class: "caution" }, CAUTION))),
        (this.questions ?? this.why)?.root),
      this.isMask ? null : this.heads.root, this.segments,
    ] : [];
    return model.header.kind === "atlas" ? [this.atlas?.root, ...maps] : [...maps, this.atlas?.root];
  }

  about() {
    const { header } = this.model;
    const bytes = Object.values(header.chunks).reduce((sum, n) => sum + n, 0);
    const entry = this.model.entry;
    const checks = header.layers.map(({ check }) => check).filter((c) => c !== null && c !== undefined);
    const lines = [...header.holds, ...header.notes,
      checks.length ? `Largest difference of the weights from the model's own output, over sampled rows: ${number(Math.max(.../** @type {number[]} */ (checks)))}.` : "",
      entry && bytes ? `${size(bytes)} of data. ${header.live ? "" : "Nothing is loaded from the network."}` : "",
      header.live ? "This page is served: weights are sent when they are looked at." : ""];
    return element("footer", { class: "card about" }, element("h2", null, "What this page holds"),
      element("ul", null, lines.filter(Boolean).map((line) => element("li", null, sentence(line, 600)))),
      element("p", { class: "under" }, sentence(header.made_by ?? "", 120)));
  }

  buildControls() {
    buildChoices(this.model, this.choices);
    buildMapTools(this.map, () => this.dark, this.mapTools);
  }

  /** @param {Set<string>} changed */
  onChange(changed) {
    const any = (/** @type {string[]} */ ...keys) => keys.some((key) => changed.has(key));
    if (any("entry", "sample", "side")) this.strip.build();
    if (any("entry", "sample", "query") && !this.strip.root.matches(":hover")) this.strip.revealQuery();
    if (any("entry", "head", "sample", "side", "scale", "norm", "overview", "hide", "rows")) this.buildControlsUnlessUsed();
    if (any("theme")) this.recolour();
    if (any("entry", "head", "sample", "side", "scale", "norm", "overview", "hide", "rows", "zoom") || (any("source") && this.model.state.hide === "chosen")) this.map.redraw();
    if (any("sort", "least", "sample", "side", "scale")) this.heads.build();
    if (any("sample")) this.atlas?.build();
    if (any("entry", "head")) {
      this.heads.mark();
      this.atlas?.mark();
    }
    if (any("entry", "head", "sample", "side", "hide", "rows")) void this.showSegments().catch(this.model.report);
    this.map.drawOver();
    if (any("preview", "query", "source", "locked", "entry", "head", "sample", "side", "hide", "rows", "scale")) void this.showPair().catch(this.model.report);
  }

  /** Selects keep their focus: they are built anew only when they show something else. */
  buildControlsUnlessUsed() {
    const active = /** @type {ShadowRoot} */ (this.root.getRootNode()).activeElement;
    const label = active?.closest(".field")?.firstChild?.textContent;
    this.buildControls();
    if (!label) return;
    for (const field of this.root.querySelectorAll(".field")) {
      if (field.firstChild?.textContent === label) /** @type {HTMLElement | null} */ (field.querySelector("select, input"))?.focus();
    }
  }

  async showPair() {
    const { model } = this;
    const turn = ++this.turn;
    if (!model.drawn) {
      this.readout.textContent = model.header.layers.some((e) => e.encoding || e.top || e.cells) ? `This record holds no maps of ${sentence(headWords(model), 80)}.` : "";
      return;
    }
    const { query } = model.pair;
    const [row, allowed] = await Promise.all([this.isMask ? maskRow(model, query) : model.row(query), model.allowed(query)]);
    if (turn !== this.turn) return;
    this.strip.show(row, allowed);
    this.questions?.showRow(row, allowed);
    void this.questions?.showColumn(model.watchedSource()).catch(model.report);
    void this.why?.show().catch(model.report);
    this.readout.textContent = this.sayCell(row, allowed);
    const { source } = model.pair;
    if (source === null || this.isMask) return;
    const blocked = !isAllowed(allowed, source);
    const reasons = blocked ? await model.reasons(query, source) : [];
    const words = reasons.filter((reason) => reason.startsWith("blocked by") || reason.endsWith("blocks it"));
    if (turn === this.turn && words.length) this.readout.textContent += ` ${words.join("; ")}.`;
  }

  /**
   * @param {import("./base/data.js").Row} row
   * @param {[number, number][] | null} allowed
   */
  sayCell(row, allowed) {
    const { model } = this;
    const { query, source } = model.pair;
    const asked = `query ${query} “\u2068${model.queryLabel(query)}\u2069”`;
    if (source === null) return `${asked}: point at the map, or click to lock.`;
    const edge = `${asked} → source ${source} “\u2068${model.sourceLabel(source)}\u2069”`;
    if (!isAllowed(allowed, source)) return `${edge}: blocked by the mask.`;
    if (this.isMask) return `${edge}: allowed.`;
    if (row.held === "none") return `${edge}: this row is not held.`;
    const value = row.values[source];
    if (row.known && !row.known[source]) return `${edge}: not among the ${model.entry.top} largest weights of the row.`;
    const rank = 1 + row.values.reduce((n, v) => n + (Math.abs(v) > Math.abs(value) ? 1 : 0), 0);
    return `${edge}: ${model.sides().length > 1 ? "difference" : "weight"} ${number(value, row.about)}, rank ${rank}.`;
  }

  async showSegments() {
    const turn = this.model.state;
    const table = await segmentTable(this.model, () => this.dark);
    if (turn !== this.model.state) return;
    fill(this.segments, table ? element("section", { class: "card", "aria-labelledby": "segments-title" }, element("h2", { id: "segments-title" }, "Segments"), table) : null);
  }

  /** @param {import("./base/state.js").Pair} pair */
  choose(pair) {
    this.model.lock(pair);
    this.map.reveal(pair);
    this.strip.revealQuery();
  }

  toggleTheme() {
    this.model.set({ theme: this.dark ? "light" : "dark" });
  }

  applyTheme() {
    this.root.dataset.theme = this.dark ? "dark" : "light";
    if (this.model.source.hash) document.documentElement.style.background = this.dark ? "#14161b" : "#f7f6f3";
  }

  recolour() {
    this.applyTheme();
    if (!this.model.entry) return;
    this.map.redraw();
    this.strip.colour();
    this.heads.repaint();
    this.atlas?.build();
    void this.showSegments().catch(this.model.report);
  }

  /** @param {KeyboardEvent} event */
  onKey(event) {
    const target = /** @type {Element} */ (event.composedPath()[0]);
    if (event.ctrlKey || event.metaKey || event.altKey || this.help.open || target.matches?.("input, select")) return;
    const { model } = this;
    if (event.key === "?") this.help.showModal();
    else if (event.key === "t") this.toggleTheme();
    else if (!model.entry) return;
    else if (event.key === "/") this.search.input.focus();
    else if (event.key === "Escape") model.free();
    else if (event.key === "j" || event.key === "k") this.step(event.key === "j" ? 1 : -1);
    else if (event.key === "[" || event.key === "]") this.stepHead(event.key === "]" ? 1 : -1);
    else if (event.key === "{" || event.key === "}") this.stepLayer(event.key === "}" ? 1 : -1);
    else if (event.key === "m" && model.entry.heads.length > 1) model.set({ head: -1 });
    else return;
    event.preventDefault();
  }

  /** @param {number} by */
  step(by) {
    const { model } = this;
    const { query } = model.pair;
    this.choose({ query: Math.max(0, Math.min(model.entry.queries - 1, query + by)), source: null });
  }

  /** @param {number} by */
  stepHead(by) {
    const { head } = this.model.state;
    const many = this.model.entry.heads.length;
    this.model.set({ head: (Math.max(head, 0) + by + many) % many });
  }

  /** @param {number} by */
  stepLayer(by) {
    const many = this.model.header.layers.length;
    this.model.set({ entry: (this.model.state.entry + by + many) % many });
  }
}

/**
 * A mask as a row: 1 where it is allowed.
 * @param {Model} model
 * @param {number} query
 * @returns {Promise<import("./base/data.js").Row>}
 */
async function maskRow(model, query) {
  const allowed = await model.allowed(query);
  const values = Float32Array.from({ length: model.entry.sources }, (_, s) => (isAllowed(allowed, s) ? 1 : 0));
  return { values, known: null, sum: 1, about: false, held: "all" };
}
