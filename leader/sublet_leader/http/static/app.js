// Which page is shown, and that it is fresh: a look a second while somebody can see it, one at a time, and seldomer where
// the database takes its time.

import { get, setToken } from "./ask.js";
import { badge } from "./dom.js";
import { GroupPage } from "./group.js";
import { GroupsPage } from "./groups.js";
import { NodesPage } from "./nodes.js";
import { visible } from "./words.js";

const FRESH_MS = 1000;
const main = document.getElementById("main");
const trouble = document.getElementById("trouble");
const who = document.getElementById("who"), accessToken = document.getElementById("access-token");
let page = null, timer = null, turn = 0;

function route(node) {
  const [, name, rest] = location.hash.match(/^#\/(\w*)\/?(.*)$/) ?? [null, "", ""];
  if (name === "group") return new GroupPage(main, decodeURIComponent(rest), node);
  return name === "nodes" ? new NodesPage(main) : new GroupsPage(main, rest);
}

function mark() {
  const here = location.hash.startsWith("#/nodes") ? "nodes" : "groups";
  for (const link of document.querySelectorAll("nav a[data-page]")) {
    if (link.dataset.page === here) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
}

async function look(mine) {
  try {
    const node = await get("node");
    if (mine !== turn) return;
    document.getElementById("node-name").textContent = node.name;
    const state = badge(node.state);
    Object.assign(state, { id: "node-state", title: node.detail });
    document.getElementById("node-state").replaceWith(state);
    if (!page) {
      page = route(node);
      page.again = refresh;
      document.title = visible(`${page.title()} – sublet`);
      mark();
    }
    await page.refresh(node);
    trouble.hidden = who.hidden = true;
  } catch (error) {
    if (mine !== turn) return;
    // Written anew it would be read aloud anew, once a second.
    const text = visible(error.message);
    if (trouble.textContent !== text) trouble.textContent = text;
    trouble.hidden = false;
    if (error.status === 401) who.hidden = false;
  }
}

async function refresh() {
  clearTimeout(timer);
  turn += 1;
  const mine = turn, began = performance.now();
  await look(mine);
  const rest = Math.max(FRESH_MS, 4 * (performance.now() - began));
  if (mine === turn && !document.hidden) timer = setTimeout(refresh, Math.min(rest, 10 * FRESH_MS));
}

addEventListener("hashchange", () => {
  if (!location.hash.startsWith("#/") && location.hash) return;
  page = null;
  main.replaceChildren();
  scrollTo(0, 0);
  refresh().then(() => main.focus({ preventScroll: true }));
});
document.addEventListener("visibilitychange", () => { if (!document.hidden) refresh(); });
// A node that asks who calls: the token stays in this page's memory.
accessToken.addEventListener("change", () => {
  setToken(accessToken.value.trim());
  accessToken.value = "";
  refresh();
});
document.querySelector(".skip").addEventListener("click", (event) => { event.preventDefault(); main.focus(); });
refresh();
