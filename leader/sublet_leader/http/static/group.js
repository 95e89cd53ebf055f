// One group: who holds what, as it changes; how far behind; what happened.

import { get } from "./ask.js";
import { Actions } from "./actions.js";
import { badge, element, show, table } from "./dom.js";
import { Seen, chart } from "./curve.js";
import { Lanes } from "./lanes.js";
import { clock, formatCount, lagTitle, owner, seconds, shortAgent, visible } from "./words.js";

const LINES = 100, UNREADABLE_LINES = 5;
const ALOUD = new Set(["grant", "reclaim", "force_release", "release", "takeover", "block", "unreadable", "readable", "command"]);

export class GroupPage {
  constructor(place, subscription, node) {
    this.subscription = subscription;
    this.seen = new Seen();
    this.lanes = new Lanes();
    this.lines = [];
    this.after = "";
    this.facts = element("div");
    this.actions = new Actions(subscription, node.actions, () => this.again?.());
    this.picture = element("div", { class: "picture" }, this.lanes.svg);
    [this.lag, this.streams, this.history] = [element("div"), element("div", { class: "scroll" }), element("div", { class: "scroll" })];
    place.replaceChildren(
      element("p", { class: "crumbs" }, element("a", { href: "#/" }, "Groups")),
      element("h1", { class: "subscription" }, subscription), this.facts, this.actions.place,
      section("Who holds what", this.picture), section("Lag over time", this.lag),
      section("What happened", this.history), section("Streams", this.streams));
  }

  title() {
    return this.subscription;
  }

  async refresh() {
    const [group, page] = await Promise.all([
      get("group", { subscription: this.subscription }),
      get("group/history", { subscription: this.subscription, after: this.after, limit: LINES }),
    ]).catch((error) => {
      if (error.status === 404) this.actions.place.hidden = true;
      throw error;
    });
    if (group.group_id !== this.groupId) {
      [this.groupId, this.lines] = [group.group_id, []];
    }
    const first = this.after === "";
    this.take(page.history, first);
    this.after = page.next;
    this.seen.add(group.group_id, group.lag);
    const width = Math.max(280, Math.floor(this.picture.clientWidth));
    show(this.facts, facts(group));
    this.actions.draw(group);
    this.lanes.draw(group, width);
    show(this.lag, chart(this.seen.of(group.group_id, group.sampled_at, group.lag_history), width));
    show(this.streams, streams(group));
    show(this.history, history(this.lines));
  }

  // Newest first; what is new is said aloud, in few words.
  take(page, first) {
    // After a failover all come once more.
    const lines = page.filter((line) => !this.lines.some((had) => had.number === line.number && had.at === line.at));
    if (!lines.length) return;
    this.lines = [...lines, ...this.lines].sort((one, other) => other.number - one.number).slice(0, LINES);
    const aloud = [...lines].reverse().filter((line) => ALOUD.has(line.event));
    if (!first && aloud.length) {
      const more = aloud.length > 3 ? `, and ${aloud.length - 3} more` : "";
      document.getElementById("said").textContent = visible(aloud.slice(0, 3).map(spoken).join("; ") + more);
    }
  }
}

function section(name, ...content) {
  const id = `section-${name.toLowerCase().replaceAll(" ", "-")}`;
  return element("section", { "aria-labelledby": id }, element("h2", { id }, name), ...content);
}

function spoken(line) {
  const stream = line.stream_id ? ` stream ${line.stream_id}` : "";
  return `${line.event}${stream}${owner(line) ? `, ${owner(line)}` : ""}: ${line.reason}`;
}

function facts(group) {
  const leader = group.leader;
  const led = leader?.alive ? `${leader.node}, term ${leader.term}, lease ${seconds(leader.lease_remaining_s)}` :
    leader ? `none; last was ${leader.node}` : "none";
  const standby = group.standby_members === null ? "" : `, ${group.standby_members.length} on standby`;
  const pairs = [
    ["State", badge(group.state)], ["Leader", led],
    ["Members", `${group.members.length} holding streams${standby}`], ["Lag", lagTitle(group)],
    ["Options", `start ${group.starting_position}, when gone ${group.on_data_loss}, strategy ${group.strategy}${group.on_poison === "skip" ? ", on poison skip" : ""}${group.holds_retention ? ", holds retention back" : ""}${group.atomic ? ", atomic" : ""}`],
  ];
  if (group.paused) pairs.push(["Paused", group.paused]);
  for (const line of group.streams.filter((each) => each.unreadable_reason !== null).slice(0, UNREADABLE_LINES)) {
    pairs.push(["Unreadable", `stream ${line.stream_id}, for ${seconds(line.unreadable_s)}: ${line.unreadable_reason}`]);
  }
  for (const reserved of group.reserved_for_sessions) {
    pairs.push(["Reserved", `${reserved.streams.length} streams for ${reserved.session}, ${seconds(reserved.remaining_s)} more`]);
  }
  return element("dl", { class: "facts" }, pairs.map(([name, value]) =>
    element("div", {}, element("dt", {}, name), element("dd", {}, value))));
}

function streams(group) {
  const number = true;
  const rows = group.streams.map((line) => [
    String(line.stream_id), line.space,
    element("span", { title: line.blocked_reason ?? line.unreadable_reason },
      badge(line.unreadable_reason === null ? line.status : "unreadable")),
    formatCount(line.position), formatCount(line.head), line.lag === null ? "?" : formatCount(line.lag), seconds(line.age_s),
    element("span", { title: line.agent }, owner(line) ?? "–"),
  ]);
  return table("Streams of the group", [{ name: "Stream", number }, { name: "Space" }, { name: "Status" },
    { name: "Position", number }, { name: "Head", number }, { name: "Lag", number }, { name: "Waiting", number },
    { name: "Owner" }], rows, "cards");
}

function history(lines) {
  if (!lines.length) return element("p", { class: "empty" }, "Nothing has happened to it that is still known.");
  const rows = lines.map((line) => [
    element("time", { datetime: line.at, title: line.at }, clock(line.at)),
    element("span", { class: line.forced ? "forced" : "" }, line.event),
    line.stream_id ? String(line.stream_id) : null,
    line.forced && line.redelivery_end > line.position ? `${line.position}–${line.redelivery_end - 1}` : null,
    element("span", { title: line.agent }, line.session || shortAgent(line.agent) || "–"), line.reason,
  ]);
  return table("What happened, the newest first", [{ name: "At" }, { name: "Event" }, { name: "Stream", number: true },
    { name: "Seen twice", number: true }, { name: "Owner" }, { name: "Reason" }], rows, "cards");
}
