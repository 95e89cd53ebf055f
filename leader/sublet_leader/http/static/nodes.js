// All nodes, and what this one knows of itself.

import { get } from "./ask.js";
import { badge, element, show, table } from "./dom.js";
import { seconds, formatCount } from "./words.js";

export class NodesPage {
  constructor(place) {
    [this.own, this.all] = [element("div"), element("div", { class: "scroll" })];
    place.replaceChildren(element("h1", {}, "Nodes"), this.all, element("h2", {}, "This node"), this.own);
  }

  title() {
    return "Nodes";
  }

  async refresh(node) {
    show(this.own, checks(node), element("dl", { class: "facts" }, facts(node)));
    const found = await get("nodes");
    show(this.all, table("Nodes", [{ name: "Node" }, { name: "State" }, { name: "Leads", number: true },
      { name: "Lease", number: true }, { name: "Address" }, { name: "HTTP" }, { name: "Notifications" }, { name: "Started" }],
    found.nodes.map(line), "cards"));
  }
}

function line(node) {
  const state = !node.alive ? "gone" : node.draining ? "draining" : "alive";
  const url = node.http_address?.startsWith("https://") ? node.http_address : `http://${node.http_address}`;
  const http = node.http_address ? element("a", { href: `${url}/`, rel: "noreferrer" }, node.http_address) : null;
  return [node.name, badge(state), formatCount(node.leads), node.alive ? seconds(node.lease_remaining_s) : null, node.address, http,
    node.notify_driver, new Date(node.started_at).toLocaleString("en-GB")];
}

function checks(node) {
  return table("Checks of this node", [{ name: "Check" }, { name: "State" }, { name: "Why" }],
    node.checks.map((check) => [check.name, badge(check.state), check.detail || null]), "cards");
}

function facts(node) {
  const stand = Object.entries(node.leaderships).map(([status, count]) => `${count} ${status}`).join(", ") || "none";
  return [["Name", node.name], ["Release", node.version], ["Life", node.incarnation], ["Leaderships", stand],
    ["Agents", `${formatCount(node.agents)}, ${formatCount(node.held_polls)} of them wait`],
    ["Groups without leader", formatCount(node.groups_without_leader)]]
    .map(([name, value]) => element("div", {}, element("dt", {}, name), element("dd", {}, value)));
}
