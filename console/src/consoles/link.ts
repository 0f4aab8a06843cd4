// The line to a machine's console: a WebSocket that comes back by itself. Owns when it is opened again.
//
// Invariant: at most one socket at a time. What ended for a reason that stays (no right, no such machine) is not tried again
// without being asked.
import { transport } from "../transport.ts";

export type LinkState =
  | { kind: "connecting" }
  | { kind: "open" }
  /** It is tried again soon, by itself. */
  | { kind: "waiting"; why: string };

export interface LinkEvents {
  state(state: LinkState): void;
  /** What the machine sends. A new socket begins with what is kept. */
  bytes(bytes: Uint8Array): void;
  text(text: string): void;
}

/** Pause before it is tried again. */
const AGAIN_MS = 2000;

export class Link {
  #socket: WebSocket | null = null;
  #timer: ReturnType<typeof setTimeout> | undefined;
  readonly #path: string;
  readonly #on: LinkEvents;

  constructor(path: string, on: LinkEvents) {
    this.#path = path;
    this.#on = on;
    this.open();
  }

  /** Connects now, if it does not. */
  open(): void {
    if (this.#socket) return;
    clearTimeout(this.#timer);
    this.#on.state({ kind: "connecting" });
    const socket = transport.socket(this.#path);
    this.#socket = socket;
    socket.onopen = () => this.#on.state({ kind: "open" });
    socket.onmessage = (event) => {
      if (event.data instanceof ArrayBuffer) this.#on.bytes(new Uint8Array(event.data));
      else this.#on.text(String(event.data));
    };
    socket.onclose = (event) => {
      this.#socket = null;
      this.#on.state({ kind: "waiting", why: event.reason || "there is no connection" });
      this.#timer = setTimeout(() => this.open(), AGAIN_MS);
    };
  }

  send(data: Uint8Array | string): void {
    if (this.#socket?.readyState !== WebSocket.OPEN) return;
    if (typeof data === "string") this.#socket.send(data);
    else this.#socket.send(data as Uint8Array<ArrayBuffer>);
  }
}

/** The machine that the page's address names: `serial.html#/machines/NAME`. Null: none. */
export function machineOf(hash: string): string | null {
  const name = hash.match(/^#\/machines\/([a-z0-9][a-z0-9.-]{0,127})$/i)?.[1];
  return name ?? null;
}

/** An element of the page, which has it. */
export function element(id: string): HTMLElement {
  const found = document.getElementById(id);
  if (!found) throw new Error(`the page has no ${id}`);
  return found;
}
