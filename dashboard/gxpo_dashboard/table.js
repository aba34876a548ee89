// @ts-check
/**
 * A table whose rows are selected, by mouse or keyboard. Headers order it through the service; names may be links.
 *
 * @typedef {{name: string, label: string, help: string, kind: string, order: boolean}} Column
 * @typedef {{id: string, name: string, color: string, cells: any[]}} Row  color: of a dot before the name
 * @typedef {{title: string, columns: Column[], rows: Row[], sorted: string, descending: boolean, links: boolean,
 *   single: boolean, selected: string[]}} Data  single: one row is always selected. selected: at the start, or when none
 *   of the selected rows is left; else it is the browser that knows
 * @typedef {{parentElement: HTMLElement, data: Data, setStateValue: (name: string, value: any) => void,
 *   setTriggerValue: (name: string, value: any) => void}} Component
 */

const POINTED_MS = 250; // at rest over a row until its curves are requested
const UNITS = /** @type {[Intl.RelativeTimeFormatUnit, number][]} */ ([
  ["day", 86400], ["hour", 3600], ["minute", 60], ["second", 1],
]);
const AGE = new Intl.RelativeTimeFormat("en", { style: "short" });

/** @param {string} tag @param {Record<string, any>} properties @param {(Node | string)[]} children */
function element(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

/** @param {Element | null} input */
const box = (input) => /** @type {HTMLInputElement} */ (input);

/** @param {number} seconds since 1970 */
function time(seconds) {
  const age = Math.max(0, Date.now() / 1000 - seconds);
  const [unit, size] = UNITS.find(([, size]) => age >= size) ?? UNITS[3];
  const title = new Date(1000 * seconds).toISOString().replace("T", " ").replace(/\..*/, " UTC"); // as formats.moment
  return element("time", { title }, AGE.format(-Math.floor(age / size), unit));
}

/** What a cell of a kind shows. All of it is text, never markup. */
const CONTENT = /** @type {Record<string, (value: any) => (Node | string)[]>} */ ({
  chips: (/** @type {[string, string][]} */ chips) =>
    chips.map(([text, color]) => element("span", { className: `chip ${color}` }, text)),
  progress: ([percent, bar]) => [
    ...(bar ? [element("progress", { max: 100, value: percent, ariaLabel: "Progress" })] : []),
    `${Math.min(Math.round(percent), percent < 100 ? 99 : 100)}%`,
  ],
  picture: (shown) => (shown ? [element("img", { src: shown[0], alt: shown[1] })] : []),
  time: (seconds) => (seconds === null ? ["–"] : [time(seconds)]),
});

class Table {
  /** @param {Component} component */
  constructor(component) {
    this.component = component;
    this.selected = new Set(component.data.selected);
    this.rows = /** @type {Map<string, HTMLElement & {written?: string}>} */ (new Map());
    this.all = /** @type {HTMLInputElement} */ (element("input"));
    this.written = "";
    this.pointed = "";
    this.body = element("tbody");
    this.head = element("thead");
    this.table = element("table", {}, this.head, this.body);
    this.waiting = 0;
    component.parentElement.append(element("div", { className: "rows-table" }, this.table));
    this.body.onclick = (event) => this.click(event);
    this.body.onmouseover = (event) => this.point(/** @type {HTMLElement} */ (event.target).closest("tr")?.id);
    this.body.onmouseleave = () => this.point("");
    this.press = (/** @type {KeyboardEvent} */ event) => this.key(event);
  }

  /** @param {Component} component */
  show(component) {
    this.component = component;
    const { data } = component;
    document.addEventListener("keydown", this.press, true);
    this.table.setAttribute("aria-label", data.title);
    this.table.className = data.single ? "single" : "";
    const head = JSON.stringify([data.columns, data.sorted, data.descending]);
    if (this.written !== head) {
      this.written = head;
      this.header(data);
    }
    const focused = document.activeElement;
    const kept = new Map(data.rows.map((row) => [row.id, this.row(row, data)]));
    for (const [id, row] of this.rows) if (!kept.has(id)) row.remove();
    // Rows in their place are not moved: the scroll position and the focus would go.
    let place = this.body.firstElementChild;
    for (const row of kept.values()) {
      if (row === place) place = row.nextElementSibling;
      else this.body.insertBefore(row, place);
    }
    this.rows = kept;
    if (focused !== document.activeElement && this.body.contains(focused))
      /** @type {HTMLElement} */ (focused).focus();
    const gone = [...this.selected].filter((id) => !kept.has(id));
    for (const id of gone) this.selected.delete(id);
    if (data.single && !this.selected.size) this.selected = new Set(data.selected);
    this.mark();
    if (gone.length && !data.single) this.tell();
  }

  close() {
    document.removeEventListener("keydown", this.press, true);
  }

  /** @param {Data} data */
  header(data) {
    this.all = box(element("input", { type: "checkbox", ariaLabel: "Select all rows of this page" }));
    this.all.onchange = () => {
      this.selected = new Set(this.all.checked ? this.rows.keys() : []);
      this.mark();
      this.tell();
    };
    const titles = data.columns.map((column) => {
      const sorted = column.name === data.sorted;
      const label = `${column.label}${sorted ? (data.descending ? " ↓" : " ↑") : ""}`;
      const title = element("th", { scope: "col", className: column.kind, title: column.help });
      if (sorted) title.setAttribute("aria-sort", data.descending ? "descending" : "ascending");
      if (!column.order) title.append(label);
      else {
        const onclick = () => this.component.setTriggerValue("order", column.name);
        title.append(element("button", { onclick }, label));
      }
      return title;
    });
    const corner = data.single ? element("td") : element("th", { scope: "col" }, this.all);
    this.head.replaceChildren(element("tr", {}, corner, ...titles));
  }

  /** The row of this id; only cells that changed are written again. @param {Row} row @param {Data} data */
  row(row, data) {
    const shown = this.rows.get(row.id) ?? element("tr", { id: row.id });
    const ages = data.columns.some((column) => column.kind === "time") ? Math.floor(Date.now() / 10000) : 0;
    const written = JSON.stringify([row, data.columns, ages]);
    if (shown.written === written) return shown;
    shown.written = written;
    const kind = data.single ? { type: "radio", name: data.title } : { type: "checkbox" };
    const input = box(shown.querySelector("input") ?? element("input", kind));
    input.ariaLabel = `Select ${row.name}`;
    const cells = data.columns.map((column, at) => {
      const content = CONTENT[column.kind]?.(row.cells[at]) ?? [row.cells[at]];
      const title = column.kind === "text" ? row.cells[at] : "";
      if (column.kind !== "name") return element("td", { className: column.kind, title }, ...content);
      const style = `color: ${row.color}`;
      const dot = row.color ? [element("span", { className: "dot", style, ariaHidden: "true" }, "●")] : [];
      const name = data.links ? element("a", { href: `?view=run&run=${row.id}` }, row.name) : row.name;
      return element("th", { scope: "row", className: "name", title: row.name }, ...dot, name);
    });
    // What stays the same stays in the page: a box taken out would lose the focus, a name under the pointer its click.
    if (!shown.children.length) shown.append(element("td", {}, input));
    for (const [at, cell] of cells.entries()) {
      const before = shown.children[at + 1];
      if (!before) shown.append(cell);
      else if (!before.isEqualNode(cell)) before.replaceWith(cell);
    }
    while (shown.children.length > cells.length + 1) shown.lastElementChild?.remove();
    return shown;
  }

  mark() {
    for (const [id, row] of this.rows) {
      const chosen = this.selected.has(id);
      row.classList.toggle("selected", chosen);
      box(row.querySelector("input")).checked = chosen;
    }
    this.all.checked = this.selected.size > 0 && this.selected.size === this.rows.size;
    this.all.indeterminate = this.selected.size > 0 && !this.all.checked;
  }

  tell() {
    this.component.setStateValue("selected", [...this.rows.keys()].filter((id) => this.selected.has(id)));
  }

  /** @param {string} id */
  toggle(id) {
    if (this.component.data.single) this.selected = new Set([id]);
    else if (!this.selected.delete(id)) this.selected.add(id);
    this.mark();
    this.tell();
  }

  /** A click on the name opens the run, with a key of the browser in a tab of its own; elsewhere it selects the row. */
  click(/** @type {any} */ event) {
    const id = event.target.closest("tr").id;
    if (!event.target.closest("a")) {
      this.toggle(id);
      box(event.target.closest("tr").querySelector("input")).focus({ preventScroll: true }); // for the keys
    } else if (!(event.ctrlKey || event.metaKey || event.shiftKey)) {
      event.preventDefault();
      this.component.setTriggerValue("opened", id);
    }
  }

  /** Curves of the row under the pointer are drawn over those of the selected ones. @param {string | undefined} id */
  point(id) {
    clearTimeout(this.waiting);
    if (this.component.data.single || this.selected.size === 0 || id === undefined || id === this.pointed) return;
    this.waiting = setTimeout(() => {
      this.pointed = id;
      this.component.setStateValue("pointed", id);
    }, POINTED_MS);
  }

  /** j and k go to the row below and above, x selects it, Enter opens it, c compares, Escape selects nothing. Where one
   * row is always selected, the browser's own arrows do it, and j and k as well. Keys are the table's where the focus
   * is in it; j, k and Escape also where no part of the page has it.
   * @param {KeyboardEvent} event */
  key(event) {
    const target = /** @type {HTMLElement} */ (event.target);
    const at = [...this.body.children].findIndex((row) => row.contains(target));
    const inside = this.table.contains(target);
    if (!inside && !target.contains(this.table)) return;
    if (document.querySelector("[role=dialog]") || event.ctrlKey || event.metaKey || event.altKey) return;
    const id = this.body.children[at]?.id;
    if (event.key === "j" || event.key === "k") {
      const next = at < 0 ? 0 : Math.min(this.rows.size - 1, Math.max(0, at + (event.key === "j" ? 1 : -1)));
      box(this.body.children[next].querySelector("input")).focus();
      if (this.component.data.single) this.toggle(this.body.children[next].id);
      else this.point(this.body.children[next].id);
    } else if (this.component.data.single) return;
    else if (event.key === "x" && id) this.toggle(id);
    else if (event.key === "Enter" && id && this.component.data.links) this.component.setTriggerValue("opened", id);
    else if (event.key === "c" && inside && this.selected.size > 1) this.component.setTriggerValue("compared", true);
    else if (event.key === "Escape" && this.selected.size) {
      this.selected.clear();
      this.mark();
      this.tell();
    } else return;
    event.preventDefault();
    event.stopPropagation();
  }
}

const tables = /** @type {WeakMap<HTMLElement, Table>} */ (new WeakMap());

/** @param {Component} component */
export default function (component) {
  const { parentElement } = component;
  const table = tables.get(parentElement) ?? new Table(component);
  tables.set(parentElement, table);
  table.show(component);
  return () => table.close();
}
