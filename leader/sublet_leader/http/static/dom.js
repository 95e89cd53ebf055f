// Making elements. Whatever is shown goes through text nodes and attributes, never through markup.

import { visible } from "./words.js";

const SVG = "http://www.w3.org/2000/svg";

function fill(made, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) made.setAttribute(name, name === "title" ? visible(value) : value);
  }
  const given = children.flat().filter((child) => child !== null && child !== undefined);
  made.append(...given.map((child) => (child instanceof Node ? child : visible(child))));
  return made;
}

export function element(name, attributes = {}, ...children) {
  return fill(document.createElement(name), attributes, children);
}

export function shape(name, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, name), attributes, children);
}

// Columns are {name, number?, sorted?, head?}, rows [cell, ...]; a cell is a text or a node, and the first names its row.
// Roles are said in words: narrow screens show rows as cards, and then browsers forget what they were.
export function table(caption, columns, rows, classes = "") {
  const kind = (column) => (column.number ? "number" : "");
  const head = columns.map((column) => element("th",
    { scope: "col", role: "columnheader", class: kind(column), "aria-sort": column.sorted }, column.head ?? column.name));
  const cell = (content, index) => element(index === 0 ? "th" : "td",
    { scope: index === 0 ? "row" : null, role: index === 0 ? "rowheader" : "cell", class: kind(columns[index]),
      "data-name": columns[index].name }, content ?? "–");
  return element("table", { class: classes, role: "table" },
    element("caption", { class: "unseen" }, caption),
    element("thead", { role: "rowgroup" }, element("tr", { role: "row" }, head)),
    element("tbody", { role: "rowgroup" }, rows.map((cells) => element("tr", { role: "row" }, cells.map(cell)))));
}

export function badge(state) {
  const kinds = { ok: "good", alive: "good", consuming: "good", held: "good", draining: "wait", paused: "wait",
    no_members: "plain", no_consumers: "plain", free: "plain" };
  return element("span", { class: `badge ${kinds[state] ?? "bad"}` }, state.replaceAll("_", " "));
}

// A button must not be replaced between being pressed and being let go, nor a text while somebody copies it.
let pressed = false;
addEventListener("pointerdown", () => { pressed = true; }, true);
for (const over of ["pointerup", "pointercancel"]) addEventListener(over, () => setTimeout(() => { pressed = false; }), true);

function isInUse(place) {
  const selection = getSelection();
  return pressed || (selection !== null && !selection.isCollapsed && place.contains(selection.anchorNode));
}

// Replaces what is in there, unless that is what is there already: so focus stays where it is.
export function show(place, ...nodes) {
  const made = element("div", {}, ...nodes);
  if (place.innerHTML !== made.innerHTML && !isInUse(place)) {
    const focused = place.contains(document.activeElement) ? document.activeElement.id : null;
    place.replaceChildren(...made.childNodes);
    if (focused) document.getElementById(focused)?.focus({ preventScroll: true });
  }
}
