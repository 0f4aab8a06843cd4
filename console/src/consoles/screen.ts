// The page of a machine's screen: noVNC on the machine's RFB stream, scaled to the page.
import RFB from "@novnc/novnc";
import { transport } from "../transport.ts";
import { enlargeable } from "./enlarge.ts";
import { element, machineOf } from "./link.ts";
import { session } from "./session.ts";
import "./screen.css";
import "../ui/theme.ts";

/** Pause before it is tried again. */
const AGAIN_MS = 2000;

const name = machineOf(location.hash);
const state = element("state");
const keys = element("keys") as HTMLButtonElement;
window.addEventListener("hashchange", () => location.reload());

function connect(machine: string): void {
  state.textContent = "Connecting";
  const socket = transport.socket(`/v1/machines/${encodeURIComponent(machine)}/screen`, ["binary"]);
  const target = element("screen");
  target.replaceChildren();
  const rfb = new RFB(target, socket);
  rfb.scaleViewport = true;
  rfb.background = "#101214";
  // What a guest copies is not put into this computer's clipboard.
  let why = "";
  socket.addEventListener("close", (event) => {
    why = event.reason;
  });
  const ctrlAltDel = () => rfb.sendCtrlAltDel();
  rfb.addEventListener("connect", () => {
    state.textContent = "Connected";
    keys.disabled = false;
    keys.addEventListener("click", ctrlAltDel);
    rfb.focus();
  });
  rfb.addEventListener("disconnect", () => {
    keys.disabled = true;
    keys.removeEventListener("click", ctrlAltDel);
    state.textContent = `Not connected: ${why || "there is no connection"}. It is tried again every 2 seconds.`;
    setTimeout(() => connect(machine), AGAIN_MS);
  });
}

if (name === null) state.textContent = "The address names no machine: screen.html#/machines/NAME";
else {
  element("title").textContent = `Screen of ${name}`;
  document.title = `${name}: screen`;
  enlargeable(() => {});
  session("screen").then((refusal) => {
    if (refusal === null) connect(name);
    else state.textContent = refusal;
  });
}
