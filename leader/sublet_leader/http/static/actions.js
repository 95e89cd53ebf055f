// Pause, resume, step down: there only if the node has an admin token, for whoever knows it.

import { act, hasToken } from "./ask.js";
import { element } from "./dom.js";

export class Actions {
  constructor(subscription, allowed, done) {
    this.place = element("div", { class: "actions", hidden: true });
    this.allowed = allowed;
    if (!allowed) return;
    [this.subscription, this.done] = [subscription, done];
    this.reason = element("input", { id: "reason", maxlength: 255, autocomplete: "off" });
    this.token = element("input", { id: "token", type: "password", autocomplete: "off" });
    this.tokenLine = element("p", {}, element("label", { for: "token" }, "Admin token "), this.token);
    this.said = element("p", { role: "status" });
    this.buttons = {
      pause: element("button", { type: "button", id: "do-pause", onclick: () => this.act("pause", { reason: this.reason.value }) }, "Pause"),
      resume: element("button", { type: "button", id: "do-resume", onclick: () => this.act("resume") }, "Resume"),
      down: element("button", { type: "button", id: "do-step-down", onclick: () => this.act("step-down") }, "Step down"),
    };
    this.place.append(element("details", {}, element("summary", {}, "Actions"),
      element("p", {}, element("label", { for: "reason" }, "Reason of a pause "), this.reason), this.tokenLine,
      element("p", { class: "buttons" }, ...Object.values(this.buttons)), this.said));
  }

  draw(group) {
    if (!this.allowed) return;
    this.place.hidden = false;
    this.buttons.pause.disabled = group.state === "paused";
    this.buttons.resume.disabled = group.state !== "paused";
    this.buttons.down.disabled = !group.leader?.alive;
    this.tokenLine.hidden = hasToken();
  }

  async act(what, more = {}) {
    try {
      await act(`group/${what}`, { subscription: this.subscription, ...more }, this.token.value);
      this.token.value = "";
      this.said.textContent = { pause: "Paused.", resume: "Resumed.", "step-down": "Its leader steps down." }[what];
    } catch (error) {
      this.said.textContent = error.message;
    }
    this.done();
  }
}
