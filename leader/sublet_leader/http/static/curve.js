// How far behind a group was: what the node remembers, then what this page has seen since.

import { element, shape } from "./dom.js";
import { clock, formatCount } from "./words.js";

const MAX_POINTS = 900;

export class Seen {
  constructor() {
    this.points = new Map();
  }

  add(groupId, lag) {
    const points = this.points.get(groupId) ?? [];
    points.push([Date.now() / 1000, lag]);
    this.points.set(groupId, points.slice(-MAX_POINTS));
  }

  of(groupId, sampledAt, curve) {
    const remembered = sampledAt.map((at, index) => [at, curve[index]]);
    const last = sampledAt.at(-1) ?? 0;
    return [...remembered, ...(this.points.get(groupId) ?? []).filter(([at]) => at > last)];
  }
}

// Where the lag is not known there is a gap.
function path(points, x, y) {
  let pen = "M";
  return points.map(([at, lag]) => {
    if (lag === null) { pen = "M"; return ""; }
    const step = `${pen}${x(at).toFixed(1)},${y(lag).toFixed(1)}`;
    pen = "L";
    return step;
  }).join("");
}

export function describeLag(points) {
  const known = points.map(([, lag]) => lag).filter((lag) => lag !== null);
  if (!known.length) return "no lag is known";
  return `lag now ${formatCount(known.at(-1))}, at most ${formatCount(Math.max(...known))}`;
}

export function sparkline(points, width = 120, height = 24) {
  return drawn(points, width, height, 2, 2, "spark");
}

function drawn(points, width, height, left, bottom, classes) {
  const known = points.map(([, lag]) => lag).filter((lag) => lag !== null);
  const from = points[0]?.[0] ?? 0, to = Math.max(points.at(-1)?.[0] ?? 1, from + 1), most = Math.max(...known, 1);
  const x = (at) => left + ((at - from) / (to - from)) * (width - left - 3);
  const y = (lag) => height - bottom - (lag / most) * (height - bottom - 4);
  return shape("svg", { class: classes, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": describeLag(points) },
    shape("title", {}, describeLag(points)), shape("path", { class: "line", d: path(points, x, y) }));
}

export function chart(points, width) {
  const height = 150, left = 8, bottom = 22;
  const picture = drawn(points, width, height, left, bottom, "chart");
  const known = points.map(([, lag]) => lag).filter((lag) => lag !== null);
  const base = height - bottom;
  picture.append(shape("path", { class: "axis", d: `M${left},${base}H${width - 3}` }));
  if (known.length) picture.append(shape("text", { x: left, y: 14 }, formatCount(Math.max(...known))));
  if (points.length > 1) {
    picture.append(shape("text", { x: left, y: height - 6 }, clock(points[0][0] * 1000)),
      shape("text", { x: width - 3, y: height - 6, "text-anchor": "end" }, clock(points.at(-1)[0] * 1000)));
  }
  return element("div", { class: "scroll" }, picture);
}
