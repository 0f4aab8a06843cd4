// The connection to a machine's console or screen: a WebSocket that comes back by itself. Owns when it is opened again.
//
// Invariant: at most one socket at a time. What ended for a reason that stays (no right, no such machine) is not tried again without
// being asked, and nothing is while nobody sees the page. A machine that is off may be started again.
import type { Refusal } from "./refusal.ts";

export type LinkState =
  | { kind: "connecting" }
  | { kind: "open" }
  /** It is tried again by itself. */
  | { kind: "waiting"; why: string; seconds: number }
  /** It is tried again when somebody asks for it. */
  | { kind: "ended"; why: string };

export interface LinkTerms {
  /** Why a socket would be refused; null if it would not. */
  refusal(): Promise<Refusal | null>;
  /** Opens a socket. */
  open(): WebSocket;
  state(state: LinkState): void;
  /** A socket that is being opened, for whoever reads it. */
  socket(socket: WebSocket): void;
}

/** The first pause before it is tried again. Each one is twice as long as the one before. */
const FIRST_MS = 1000;
const MOST_MS = 30_000;
/** A connection that lasted this long was a good one: after it, pauses begin anew. */
const STEADY_MS = 10_000;
/** The daemon's codes for what does not become better by trying again: no right any more, and a place that others need. */
const FINAL_CODES = [1008, 1013];
/** The daemon takes messages of 16 KiB. */
const PIECE_BYTES = 8192;

export class Link {
  #socket: WebSocket | null = null;
  #timer: ReturnType<typeof setTimeout> | undefined;
  #isAsking = false;
  #isWaiting = false;
  #pause = FIRST_MS;
  #openedAt = 0;
  readonly #terms: LinkTerms;

  constructor(terms: LinkTerms) {
    this.#terms = terms;
    void this.connect();
  }

  /** Connects now, unless it is connected or about to be. */
  async connect(): Promise<void> {
    if (this.#socket || this.#isAsking) return;
    this.#isAsking = true;
    this.#isWaiting = false;
    clearTimeout(this.#timer);
    this.#terms.state({ kind: "connecting" });
    const refusal = await this.#terms.refusal();
    this.#isAsking = false;
    if (refusal?.isFinal) return this.#terms.state({ kind: "ended", why: refusal.why });
    if (refusal) return this.#wait(refusal.why);
    const socket = this.#terms.open();
    this.#socket = socket;
    socket.addEventListener("open", () => {
      this.#openedAt = Date.now();
      this.#terms.state({ kind: "open" });
    });
    socket.addEventListener("close", ({ code, reason }) => this.#closed(code, reason));
    this.#terms.socket(socket);
  }

  #closed(code: number, reason: string): void {
    this.#socket = null;
    const isSteady = this.#openedAt > 0 && Date.now() - this.#openedAt >= STEADY_MS;
    this.#openedAt = 0;
    if (isSteady) this.#pause = FIRST_MS;
    const why = reason || "the connection was lost";
    if (FINAL_CODES.includes(code)) this.#terms.state({ kind: "ended", why });
    else this.#wait(why);
  }

  #wait(why: string): void {
    this.#isWaiting = true;
    this.#terms.state({ kind: "waiting", why, seconds: this.#pause / 1000 });
    this.#timer = setTimeout(() => this.#resume(), this.#pause);
    this.#pause = Math.min(this.#pause * 2, MOST_MS);
  }

  #resume(): void {
    if (!this.#isWaiting) return;
    if (document.visibilityState !== "hidden") void this.connect();
    else document.addEventListener("visibilitychange", () => this.#resume(), { once: true });
  }

  send(data: Uint8Array | string): void {
    const socket = this.#socket;
    if (socket?.readyState !== WebSocket.OPEN) return;
    if (typeof data === "string") socket.send(data);
    else {
      for (let at = 0; at < data.length; at += PIECE_BYTES)
        socket.send(data.slice(at, at + PIECE_BYTES) as Uint8Array<ArrayBuffer>);
    }
  }
}

/** What is said above the console of a connection that is not open. */
export function linkWords(state: Exclude<LinkState, { kind: "open" }>): string {
  if (state.kind === "connecting") return "Connecting";
  const again = state.kind === "waiting" ? ` It is tried again in ${state.seconds} s.` : "";
  return `Not connected: ${state.why}.${again}`;
}
