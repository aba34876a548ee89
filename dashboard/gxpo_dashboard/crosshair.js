// @ts-check
/**
 * One crosshair over all charts of a page that share an x-axis: a line at the point under the pointer, and the points
 * there. Vega draws SVG and keeps with each element the item that it draws; Streamlit offers no other way to it.
 */

const CHART = "[data-testid=stVegaLiteChart] svg.marks";
const NEAR_PX = 4; // from the line to a point that belongs to it
const NUMBER = new Intl.NumberFormat(
  "en", { maximumSignificantDigits: 4, maximumFractionDigits: 0, roundingPriority: "morePrecision" },
);
const UNITS = /** @type {Record<string, number>} */ ({ "%": 100, k: 1e-3, M: 1e-6, G: 1e-9, T: 1e-12 });
let frame = 0;

/** @param {Element} root @param {string} selector @returns {any[]} */
const items = (root, selector) => [...root.querySelectorAll(selector)].map((element) => /** @type {any} */ (element).__data__);

/** @param {Element} parent @param {string} tag @param {Record<string, any>} attributes @param {string} text */
function draw(parent, tag, attributes, text = "") {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.textContent = text;
  return parent.appendChild(made);
}

/** How the y-axis writes a value: in the unit of its last tick. @param {Element} svg */
function writer(svg) {
  const ticks = items(svg, "[aria-label^='Y-axis titled'] .role-axis-label text");
  const [unit] = / ?[%kMGT]?B?$/.exec(ticks.at(-1)?.text ?? "") ?? [""];
  return (/** @type {number} */ y) => NUMBER.format(y * (UNITS[unit.trim()[0]] ?? 1)) + unit;
}

/** The plot of a chart, in pixels from its own corner; null if its x-axis has no two ticks. @param {Element} svg */
function plotOf(svg) {
  const axis = svg.querySelector("[aria-label^='X-axis titled']");
  const ticks = axis ? items(axis, ".role-axis-label text") : [];
  const area = svg.querySelector(".root path.background");
  if (!axis || !area?.parentElement || ticks.length < 2) return null;
  const [first, last] = [ticks[0], ticks[ticks.length - 1]];
  const unit = (last.x - first.x) / (last.datum.value - first.datum.value);
  return {
    title: axis.getAttribute("aria-label")?.replace(/ for a .*/, ""),
    box: area.getBoundingClientRect(),
    parent: area.parentElement,
    points: items(svg, ".mark-symbol.role-mark path").filter((point) => Number.isFinite(point?.datum?.x)),
    place: (/** @type {number} */ x) => first.x + unit * (x - first.datum.value),
  };
}

function clear() {
  for (const drawn of document.querySelectorAll(".crosshair")) drawn.remove();
}

/** @param {Element | null | undefined} chart @param {number} clientX */
function show(chart, clientX) {
  clear();
  const own = chart && plotOf(chart);
  if (!own || clientX < own.box.left || clientX > own.box.right || !own.points.length) return;
  const distance = (/** @type {any} */ point) => Math.abs(own.box.left + point.x - clientX);
  const { x } = own.points.reduce((best, point) => (distance(point) < distance(best) ? point : best)).datum;
  for (const svg of document.querySelectorAll(CHART)) {
    const plot = plotOf(svg);
    const at = plot?.place(x) ?? -1;
    if (!plot || plot.title !== own.title || at < 0 || at > plot.box.width) continue;
    const group = draw(plot.parent, "g", { class: "crosshair", "pointer-events": "none" });
    draw(group, "line", { x1: at, x2: at, y2: plot.box.height, stroke: "currentColor", "stroke-opacity": 0.5 });
    if (svg === chart) continue; // Vega shows its own
    const words = { "font-size": 11, fill: "currentColor", stroke: "Canvas", "stroke-width": 3, "paint-order": "stroke" };
    const anchor = at > 0.8 * plot.box.width ? { dx: -7, "text-anchor": "end" } : { dx: 7 };
    const write = writer(svg);
    for (const point of plot.points.filter((point) => Math.abs(point.x - at) < NEAR_PX)) {
      draw(group, "circle", { cx: point.x, cy: point.y, r: 4, fill: point.fill ?? "currentColor" });
      draw(group, "text", { x: point.x, y: point.y - 4, ...anchor, ...words }, write(point.datum.y));
    }
  }
}

/** @param {PointerEvent} event */
function move(event) {
  const chart = /** @type {Element} */ (event.target).closest?.(CHART);
  cancelAnimationFrame(frame);
  frame = requestAnimationFrame(() => show(chart, event.clientX));
}

export default function () {
  document.addEventListener("pointermove", move);
  return () => {
    document.removeEventListener("pointermove", move);
    clear();
  };
}
