// All groups: searched, sorted and paged by the database. What was asked for is in the address, so that Back finds it again.

import { get } from "./ask.js";
import { badge, element, show, table } from "./dom.js";
import { Seen, sparkline } from "./curve.js";
import { lag, lagTitle, formatCount } from "./words.js";

const PER_PAGE = 50;
const FIRST = { search: "", sort: "name", order: "asc", offset: 0 };
const SORTS = { Group: "name", Streams: "streams", Lag: "lag" };

export class GroupsPage {
  constructor(place, query) {
    this.seen = new Seen();
    this.asked = { ...FIRST, ...Object.fromEntries(new URLSearchParams(query)) };
    const search = element("input", { type: "search", id: "search", autocomplete: "off", maxlength: 200, value: this.asked.search,
      oninput: (event) => this.ask({ search: event.target.value.trim(), offset: 0 }) });
    this.body = element("div", { onclick: (event) => this.pressed(event.target.closest("button")) });
    this.pager = element("nav", { class: "pager", "aria-label": "Pages of groups",
      onclick: (event) => this.pressed(event.target.closest("button")) });
    place.replaceChildren(element("h1", {}, "Groups"),
      element("p", { class: "search" }, element("label", { for: "search" }, "Search "), search), this.body, this.pager);
  }

  title() {
    return "Groups";
  }

  ask(change) {
    Object.assign(this.asked, change);
    const changed = Object.entries(this.asked).filter(([name, value]) => String(value) !== String(FIRST[name]));
    history.replaceState(null, "", changed.length ? `#/?${new URLSearchParams(changed)}` : "#/");
    clearTimeout(this.soon);
    this.soon = setTimeout(() => this.again?.(), change.search === undefined ? 0 : 200);
  }

  async refresh() {
    const asked = { ...this.asked };
    const found = await get("groups", { ...asked, limit: PER_PAGE });
    if (JSON.stringify(asked) !== JSON.stringify(this.asked) || !this.body.isConnected) return;
    if (found.offset >= found.total && found.offset > 0) return this.ask({ offset: 0 });
    for (const group of found.groups) this.seen.add(group.group_id, group.lag);
    show(this.body, this.table(found));
    show(this.pager, ...this.pages(found));
  }

  // The table is drawn anew all the time, so clicks on its buttons are handled here.
  pressed(button) {
    if (button?.dataset.sort) this.sort(button.dataset.sort);
    else if (button?.dataset.offset) this.ask({ offset: Number(button.dataset.offset) });
  }

  sort(by) {
    const turned = this.asked.sort === by && this.asked.order === (by === "name" ? "asc" : "desc");
    this.ask({ sort: by, order: (by === "name") === turned ? "desc" : "asc", offset: 0 });
  }

  column(name, number = false) {
    const by = SORTS[name], is = this.asked.sort === by;
    const sorted = is ? (this.asked.order === "asc" ? "ascending" : "descending") : null;
    const head = by ? element("button", { type: "button", id: `sort-${by}`, "data-sort": by }, name,
      element("span", { "aria-hidden": "true" }, is ? (sorted === "ascending" ? " ▲" : " ▼") : "")) : null;
    return { name, number, sorted, head };
  }

  table(found) {
    if (!found.groups.length) {
      return element("p", { class: "empty" }, this.asked.search ? "No group is called so." :
        "There are no groups yet. A consumer makes one: sublet consume '$share/billing/orders/#'");
    }
    const rows = found.groups.map((group) => {
      const points = this.seen.of(group.group_id, found.sampled_at, found.lag_history[group.group_id]);
      const streams = Object.values(group.streams_by_status).reduce((sum, count) => sum + count, 0);
      return [
        element("a", { id: `group-${group.group_id}`, href: `#/group/${encodeURIComponent(group.subscription)}` }, group.subscription),
        badge(group.state), group.leader?.alive ? group.leader.node : null,
        `${formatCount(group.streams_by_status.held ?? 0)} of ${formatCount(streams)}`,
        element("span", { title: lagTitle(group) }, lag(group)), sparkline(points),
      ];
    });
    return table(`Groups, ${this.asked.sort}`, [this.column("Group"), this.column("State"), this.column("Leader"),
      this.column("Streams", true), this.column("Lag", true), this.column("Lag over time")], rows, "cards groups");
  }

  pages(found) {
    const from = found.offset, to = from + found.groups.length;
    const button = (text, offset, usable) =>
      element("button", { type: "button", id: `page-${text}`, "data-offset": offset, disabled: !usable }, text);
    return [
      element("span", { role: "status" }, found.total ? `${formatCount(from + 1)}–${formatCount(to)} of ${formatCount(found.total)}` : "none"),
      button("Previous", Math.max(0, from - PER_PAGE), from > 0), button("Next", from + PER_PAGE, to < found.total),
    ];
  }
}
