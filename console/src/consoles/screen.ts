// The page of a machine's screen: noVNC on the machine's RFB stream, scaled to the page.
import RFB from "@novnc/novnc";
import { onTold } from "../state/tabs.ts";
import { transport } from "../transport.ts";
import { Link, linkWords } from "./link.ts";
import { element, enlargeable, isLeaving, isOwnWindow, machineOf, show } from "./page.ts";
import { path, refusal } from "./refusal.ts";
import "./screen.css";
import "../ui/theme.ts";

const name = machineOf(location.hash);
const state = element("state");
const keys = element("keys") as HTMLButtonElement;
const enter = element("enter");
const again = element("again");
const target = element("screen");
window.addEventListener("hashchange", () => location.reload());

function start(machine: string): void {
  let rfb: RFB | null = null;
  /** Whether the next connection may have the focus: the last one had it, or nobody else is in the window. */
  let isFocused = isOwnWindow();
  const link = new Link({
    refusal: () => refusal("screen", machine),
    open: () => transport.socket(path(machine, "screen"), ["binary"]),
    state(now) {
      const isOver = now.kind === "waiting" || now.kind === "ended";
      if (isOver && rfb) isFocused = target.contains(document.activeElement);
      if (isOver) rfb = null;
      show(again, isOver);
      keys.disabled = true;
      state.textContent = now.kind === "open" ? "Waiting for the picture" : linkWords(now);
    },
    socket(socket) {
      target.replaceChildren();
      const made = new RFB(target, socket);
      rfb = made;
      made.scaleViewport = true;
      made.background = "#101214";
      // What a guest copies is not put into this computer's clipboard.
      made.addEventListener("connect", () => {
        state.textContent = "Connected";
        keys.disabled = false;
        if (isFocused && document.activeElement === document.body) made.focus();
      });
    },
  });
  keys.addEventListener("click", () => rfb?.sendCtrlAltDel());
  enter.addEventListener("click", () => rfb?.focus());
  again.addEventListener("click", () => void link.connect());
  // Whoever has signed in may be another, and who has signed out leaves nothing to be seen: begun anew, it shows what is theirs now.
  onTold(() => location.reload());
  target.addEventListener(
    "keydown",
    (event) => {
      if (!isLeaving(event)) return;
      event.preventDefault();
      event.stopPropagation();
      enter.focus();
      // noVNC releases all keys in the guest, as when the window loses the focus: their ends are not seen here any more.
      window.dispatchEvent(new Event("blur"));
    },
    { capture: true },
  );
}

if (name === null) state.textContent = "The address names no machine: screen.html#/machines/NAME";
else {
  element("title").textContent = `Screen of ${name}`;
  document.title = `${name}: screen`;
  enlargeable();
  start(name);
}
