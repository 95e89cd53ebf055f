// The picture of one group: a lane for each member and one for what nobody holds, and in them the streams. A stream that
// moves is seen to go from lane to lane, since its drawing stays the same and only its place changes.

import { shape } from "./dom.js";
import { formatCount, shortAgent, visible } from "./words.js";

const CHIP = { width: 58, height: 30, gap: 6 };
const LANE = { top: 26, bottom: 10, gap: 8, inside: 10, least: 275 };
const SHINES_MS = 4000;
const MOST = 512;

export class Lanes {
  constructor() {
    this.chips = new Map();
    this.title = shape("title", { id: "lanes-title" });
    this.description = shape("desc", { id: "lanes-desc" });
    this.back = shape("g");
    this.front = shape("g");
    this.svg = shape("svg", { class: "lanes", role: "img", "aria-labelledby": "lanes-title lanes-desc" },
      this.title, this.description, this.back, this.front);
  }

  draw(group, width) {
    const streams = group.streams.filter((line) => line.status !== "finished").slice(0, MOST);
    const lanes = lanesOf(group, streams);
    const most = Math.max(...streams.map((line) => line.lag ?? 0), 1);
    const columns = Math.max(1, Math.min(lanes.length, Math.floor(width / LANE.least)));
    const across = (width - (columns - 1) * LANE.gap) / columns;
    const perRow = Math.max(1, Math.floor((across - 2 * LANE.inside + CHIP.gap) / (CHIP.width + CHIP.gap)));
    this.back.replaceChildren();
    this.drawn = new Set();
    let top = 0;
    for (let first = 0; first < lanes.length; first += columns) {
      const beside = lanes.slice(first, first + columns);
      const rows = Math.max(1, ...beside.map((lane) => Math.ceil(lane.streams.length / perRow)));
      const height = LANE.top + rows * (CHIP.height + CHIP.gap) - CHIP.gap + LANE.bottom;
      beside.forEach((lane, column) => this.lane(lane, column * (across + LANE.gap), top, across, height, perRow, most));
      top += height + LANE.gap;
    }
    for (const [id, chip] of this.chips) if (!this.drawn.has(id)) { chip.node.remove(); this.chips.delete(id); }
    this.svg.setAttribute("viewBox", `0 0 ${width} ${Math.max(top, 40)}`);
    this.svg.setAttribute("height", Math.max(top, 40));
    this.title.textContent = visible(`Who holds which streams of ${group.subscription}`);
    this.description.textContent = visible(lanes.map((lane) =>
      `${lane.name}: ${lane.streams.map((line) => line.stream_id).join(", ") || "none"}`).join("; "));
  }

  lane(lane, left, top, width, height, perRow, most) {
    this.back.append(
      shape("rect", { class: `lane ${lane.kind}`, x: left + 0.5, y: top + 0.5, width: width - 1, height, rx: 6 }),
      shape("text", { class: "lane-name", x: left + LANE.inside, y: top + 18 }, shape("title", {}, lane.title),
        `${fit(visible(lane.name), width - 60)} · ${lane.streams.length}`));
    lane.streams.forEach((line, index) => {
      const x = left + LANE.inside + (index % perRow) * (CHIP.width + CHIP.gap);
      const y = top + LANE.top + Math.floor(index / perRow) * (CHIP.height + CHIP.gap);
      this.place(line, lane, x, y, most);
      this.drawn.add(line.stream_id);
    });
  }

  place(line, lane, x, y, most) {
    let chip = this.chips.get(line.stream_id);
    if (!chip) {
      chip = { node: shape("g"), lane: null, bar: shape("rect", { class: "bar", x: 4, y: CHIP.height - 7, height: 3, rx: 1.5 }),
        title: shape("title") };
      chip.box = shape("rect", { class: "box", width: CHIP.width, height: CHIP.height, rx: 4 });
      chip.text = shape("text", { x: CHIP.width / 2, y: 16, "text-anchor": "middle" }, String(line.stream_id));
      chip.node.append(chip.title, chip.box, chip.text, chip.bar);
      this.front.append(chip.node);
      this.chips.set(line.stream_id, chip);
    }
    if (chip.lane !== null && chip.lane !== lane.key) chip.movedAt = Date.now();
    chip.lane = lane.key;
    const shines = chip.movedAt && Date.now() - chip.movedAt < SHINES_MS;
    chip.node.setAttribute("class", `chip ${line.status}${line.lag === null ? " unknown" : ""}${shines ? " moved" : ""}`);
    chip.node.style.transform = `translate(${x}px, ${y}px)`;
    const part = line.lag ? Math.max(0.06, Math.log1p(line.lag) / Math.log1p(most)) : 0;
    chip.bar.setAttribute("width", ((CHIP.width - 8) * (line.lag === null ? 1 : part)).toFixed(1));
    chip.title.textContent =
      `Stream ${line.stream_id}: ${line.status}, at ${formatCount(line.position)} of ${formatCount(line.head)}, lag ${line.lag === null ? "unknown" : formatCount(line.lag)}`;
  }
}

function fit(text, width) {
  const most = Math.max(8, Math.floor(width / 7.5));
  return text.length > most ? `${text.slice(0, most - 1)}…` : text;
}

function lanesOf(group, streams) {
  const lanes = new Map();
  for (const member of [...group.members, ...(group.standby_members ?? [])]) {
    lanes.set(member.borrower_id, { key: member.agent, name: member.session || shortAgent(member.agent), kind: "member",
      title: `${member.session ?? ""} ${member.agent} ${member.borrower_id}`, streams: [] });
  }
  const nobody = { key: "", name: "held by nobody", kind: "nobody", title: "streams that are granted to nobody", streams: [] };
  for (const line of streams) (lanes.get(line.borrower_id) ?? nobody).streams.push(line);
  const sorted = [...lanes.values()].sort((a, b) => (a.name + a.key).localeCompare(b.name + b.key));
  return nobody.streams.length || !sorted.length ? [...sorted, nobody] : sorted;
}
