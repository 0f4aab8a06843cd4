// The page of a machine's serial console. What the guest sends goes to the terminal as it is, and nowhere else: xterm.js draws it,
// and none of its sequences can name the page, open a link, or reach the clipboard.
import { FitAddon } from "@xterm/addon-fit";
import { Terminal } from "@xterm/xterm";
import { onTold } from "../state/tabs.ts";
import { transport } from "../transport.ts";
import { Link, type LinkState, linkWords } from "./link.ts";
import { element, enlargeable, isLeaving, isOwnWindow, machineOf, show } from "./page.ts";
import { path, refusal } from "./refusal.ts";
import "./serial.css";
import "../ui/theme.ts";

type Keyboard = "yours" | "free" | "taken";

const name = machineOf(location.hash);
const said = element("state");
const take = element("take");
const enter = element("enter");
const again = element("again");
window.addEventListener("hashchange", () => location.reload());

/** What is said above the terminal. */
function words(link: LinkState, keyboard: Keyboard): string {
  if (link.kind !== "open") return linkWords(link);
  if (keyboard === "taken") return "Somebody else types. You see what they see.";
  return keyboard === "yours"
    ? "You have the keyboard."
    : "Nobody types. The first who does has the keyboard.";
}

/** What a terminal says when it gets or loses the focus, if the guest asks for it. It would take a keyboard that nobody has. */
const FOCUS_REPORTS = ["\x1b[I", "\x1b[O"];

/**
 * A terminal answers questions of the guest by itself, as if somebody typed. Here that would type into a guest that is only looked
 * at, and answer again what firmware asked long ago, whenever the page is opened. So it answers none.
 */
function silence(terminal: Terminal): void {
  const { parser } = terminal;
  for (const final of ["n", "c"]) {
    parser.registerCsiHandler({ final }, () => true);
    for (const prefix of ["?", ">", "="]) parser.registerCsiHandler({ prefix, final }, () => true);
  }
  parser.registerCsiHandler({ intermediates: "$", final: "p" }, () => true);
  parser.registerCsiHandler({ prefix: "?", intermediates: "$", final: "p" }, () => true);
  parser.registerCsiHandler({ final: "t" }, () => true);
  parser.registerDcsHandler({ intermediates: "$", final: "q" }, () => true);
  for (const colours of [4, 10, 11, 12]) parser.registerOscHandler(colours, () => true);
  // A link: its text would say nothing of where it leads.
  parser.registerOscHandler(8, () => true);
}

function start(machine: string): void {
  element("title").textContent = `Serial console of ${machine}`;
  document.title = `${machine}: serial console`;
  const terminal = new Terminal({
    cursorBlink: !matchMedia("(prefers-reduced-motion: reduce)").matches,
    fontFamily: "ui-monospace, 'DejaVu Sans Mono', monospace",
    fontSize: 14,
    scrollback: 5000,
    screenReaderMode: true,
    theme: { background: "#101214", foreground: "#e4e8eb" },
  });
  silence(terminal);
  const fit = new FitAddon();
  terminal.loadAddon(fit);
  terminal.open(element("terminal"));
  fit.fit();
  new ResizeObserver(() => fit.fit()).observe(element("terminal"));
  if (terminal.textarea) terminal.textarea.tabIndex = -1;
  terminal.attachCustomKeyEventHandler((event) => {
    if (!isLeaving(event)) return true;
    event.preventDefault();
    enter.focus();
    return false;
  });

  let state: LinkState = { kind: "connecting" };
  let keyboard: Keyboard = "free";
  const tell = () => {
    said.textContent = words(state, keyboard);
    show(take, state.kind === "open" && keyboard === "taken");
    show(again, state.kind === "waiting" || state.kind === "ended");
  };
  const link = new Link({
    refusal: () => refusal("console", machine),
    open: () => transport.socket(path(machine, "console")),
    state(now) {
      state = now;
      // Whoever comes after a session may not read what the guest has shown in it.
      if (now.kind === "ended") terminal.reset();
      tell();
    },
    socket(socket) {
      let isNew = true;
      socket.onmessage = ({ data }: MessageEvent<ArrayBuffer | string>) => {
        if (data instanceof ArrayBuffer) {
          // It begins with all that is kept, of which the terminal may have a part.
          if (isNew) terminal.reset();
          isNew = false;
          terminal.write(new Uint8Array(data));
          return;
        }
        const told = JSON.parse(data) as { keyboard?: Keyboard; lost?: number };
        if (told.keyboard) keyboard = told.keyboard;
        tell();
        if (told.lost) said.textContent = `${told.lost} bytes were lost: this browser reads too slowly.`;
      };
    },
  });
  const encoder = new TextEncoder();
  terminal.onData((keys) => {
    if (!FOCUS_REPORTS.includes(keys)) link.send(encoder.encode(keys));
  });
  terminal.onBinary((keys) => link.send(Uint8Array.from(keys, (key) => key.charCodeAt(0))));
  take.addEventListener("click", () => {
    link.send(JSON.stringify({ take: true }));
    terminal.focus();
  });
  enter.addEventListener("click", () => terminal.focus());
  again.addEventListener("click", () => void link.connect());
  // Whoever has signed in may be another, and who has signed out leaves nothing to be seen: begun anew, it shows what is theirs now.
  onTold(() => location.reload());
  if (isOwnWindow()) terminal.focus();
  tell();
}

if (name === null) said.textContent = "The address names no machine: serial.html#/machines/NAME";
else {
  enlargeable();
  start(name);
}
