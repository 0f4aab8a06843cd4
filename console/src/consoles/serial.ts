// The page of a machine's serial console. What the guest sends goes to the terminal as it is, and nowhere else: xterm.js draws it,
// and none of its sequences can name the page, open a link, or reach the clipboard.
import { FitAddon } from "@xterm/addon-fit";
import { Terminal } from "@xterm/xterm";
import { enlargeable } from "./enlarge.ts";
import { element, Link, type LinkState, machineOf } from "./link.ts";
import { session } from "./session.ts";
import "./serial.css";
import "../ui/theme.ts";

type Keyboard = "yours" | "free" | "taken";

const name = machineOf(location.hash);
const state = element("state");
const take = element("take");
window.addEventListener("hashchange", () => location.reload());

/** What is said above the terminal. */
function words(link: LinkState, keyboard: Keyboard): string {
  if (link.kind === "connecting") return "Connecting";
  if (link.kind === "waiting") return `Not connected: ${link.why}. It is tried again every 2 seconds.`;
  if (keyboard === "taken") return "Somebody else types. You see what they see.";
  return keyboard === "yours"
    ? "You have the keyboard."
    : "Nobody types. The first who does has the keyboard.";
}

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
  enlargeable(() => terminal.focus());

  let link: LinkState = { kind: "connecting" };
  let keyboard: Keyboard = "free";
  let isNew = true;
  const show = () => {
    state.textContent = words(link, keyboard);
    take.hidden = link.kind !== "open" || keyboard !== "taken";
  };
  const line = new Link(`/v1/machines/${encodeURIComponent(machine)}/console`, {
    state(now) {
      link = now;
      isNew ||= now.kind === "connecting";
      show();
    },
    bytes(bytes) {
      // It begins with all that is kept, of which the terminal may have a part.
      if (isNew) terminal.reset();
      isNew = false;
      terminal.write(bytes);
    },
    text(text) {
      const told: unknown = JSON.parse(text);
      const of = told && typeof told === "object" && "keyboard" in told ? told.keyboard : undefined;
      if (of === "yours" || of === "free" || of === "taken") keyboard = of;
      show();
      const lost = told && typeof told === "object" && "lost" in told ? told.lost : undefined;
      if (typeof lost === "number")
        state.textContent = `${lost} bytes were lost: this browser reads too slowly.`;
    },
  });
  const encoder = new TextEncoder();
  terminal.onData((keys) => line.send(encoder.encode(keys)));
  terminal.onBinary((keys) => line.send(Uint8Array.from(keys, (key) => key.charCodeAt(0))));
  take.addEventListener("click", () => {
    line.send(JSON.stringify({ take: true }));
    terminal.focus();
  });
  terminal.focus();
  show();
}

if (name === null) state.textContent = "The address names no machine: serial.html#/machines/NAME";
else {
  session("console").then((refusal) => {
    if (refusal === null) start(name);
    else state.textContent = refusal;
  });
}
