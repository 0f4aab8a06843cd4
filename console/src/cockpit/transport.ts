// How the console reaches the daemon from a page of Cockpit: through Cockpit's bridge on the host, to the daemon's socket. No port, no
// token and no cookie is of this project: who may do this is decided by Cockpit's login and by the permissions of the socket.
//
// Invariant: everything goes to the socket of the host that serves the page, and nowhere else.
import {
  NoConnection,
  parse,
  type Reply,
  type Request,
  type Stream,
  type StreamCallbacks,
  type Transport,
} from "../transport.ts";
import type { Client, Cockpit, Ended, Failure, Sent } from "./cockpit";
import { EventReader } from "./event-reader.ts";
import { ChannelSocket } from "./socket.ts";

const DEFAULT_SOCKET = "/run/spillway/spillwayd.sock";
/** Pause before a stream of events is tried again. */
const AGAIN_MS = 3000;
/**
 * How long an answer to a GET may take, and a stream be silent. The daemon says something on a stream every 15 seconds. Cockpit 287 does
 * not tell of a connection that ends before its response does, as when the daemon dies.
 */
const SILENCE_MS = 30_000;

/** The daemon's socket, as the manifest of this package says. */
function socketOf(manifests: Record<string, unknown>): string {
  const own = manifests.spillway as { config?: { socket?: unknown } } | undefined;
  const socket = own?.config?.socket;
  return typeof socket === "string" && socket.startsWith("/") ? socket : DEFAULT_SOCKET;
}

function headerOf(headers: Record<string, string>, name: string): string | null {
  const found = Object.keys(headers).find((key) => key.toLowerCase() === name);
  return found === undefined ? null : (headers[found] ?? null);
}

export class CockpitTransport implements Transport {
  readonly #cockpit: Cockpit;
  readonly #socket: string;
  readonly #client: Client;
  /** When Cockpit's own connection is there. */
  readonly #ready: Promise<void>;
  #hasEnded = false;

  constructor(cockpit: Cockpit) {
    this.#cockpit = cockpit;
    this.#socket = socketOf(cockpit.manifests);
    this.#client = cockpit.http(this.#socket, { superuser: "try", binary: true });
    this.#ready = new Promise((ready) => cockpit.transport.wait(ready));
    // Lives as long as Cockpit's connection. What is opened on an ended one would never be answered.
    cockpit.channel({ payload: "null" }).addEventListener("close", () => {
      this.#hasEnded = true;
    });
  }

  async request({ method, path, body, headers, signal }: Request): Promise<Reply> {
    await this.#usable();
    signal?.throwIfAborted();
    return new Promise((done, failed) => {
      const sent = this.#client.request({
        method,
        path,
        headers: {
          Accept: "application/json",
          ...(body === undefined ? {} : { "Content-Type": "application/json" }),
          ...headers,
        },
        body: body === undefined ? "" : new TextEncoder().encode(JSON.stringify(body)),
      });
      const cancel = () => sent.close("cancelled");
      signal?.addEventListener("abort", cancel, { once: true });
      // An act may take as long as it needs, and who gives a signal has a deadline of its own.
      const timer = method === "GET" && !signal ? setTimeout(cancel, SILENCE_MS) : undefined;
      const settle = () => {
        clearTimeout(timer);
        signal?.removeEventListener("abort", cancel);
      };
      let status = 0;
      let etag: string | null = null;
      sent.response((came, fields) => {
        status = came;
        etag = headerOf(fields, "etag");
      });
      const reply = (data?: Uint8Array) => {
        done({ status, etag, body: parse(new TextDecoder().decode(data)) });
      };
      sent.then(
        // A connection that ends before an answer is no problem to Cockpit.
        (data) => {
          settle();
          if (status) reply(data);
          else failed(new NoConnection(this.#words({})));
        },
        (failure, data) => {
          settle();
          if (failure.status) reply(data);
          else if (signal?.aborted) failed(signal.reason);
          else failed(new NoConnection(this.#words(failure)));
        },
      );
    });
  }

  stream(path: string, callbacks: StreamCallbacks): Stream {
    let id = "";
    let isClosed = false;
    let sent: Sent | undefined;
    let timer: ReturnType<typeof setTimeout> | undefined;
    const again = () => {
      clearTimeout(timer);
      if (isClosed) return;
      callbacks.interrupted();
      timer = setTimeout(open, AGAIN_MS);
    };
    const listen = () => {
      clearTimeout(timer);
      timer = setTimeout(() => sent?.close("timeout"), SILENCE_MS);
    };
    const open = async () => {
      try {
        await this.#usable();
      } catch {
        return again();
      }
      if (isClosed) return;
      const reader = new EventReader(id);
      const headers = { Accept: "text/event-stream", ...(id ? { "Last-Event-ID": id } : {}) };
      sent = this.#client.request({ method: "GET", path, headers, body: "" });
      listen();
      sent.response((status) => {
        if (status === 200 && !isClosed) callbacks.opened();
      });
      sent.stream((data) => {
        if (isClosed) return;
        listen();
        try {
          for (const event of reader.take(data)) {
            id = event.id;
            callbacks.message(event.data);
          }
        } catch {
          close();
          callbacks.failed();
        }
      });
      sent.then(again, (failure: Failure) => {
        if (!failure.status) return again();
        clearTimeout(timer);
        if (!isClosed) callbacks.failed();
      });
    };
    const close = () => {
      isClosed = true;
      clearTimeout(timer);
      sent?.close("cancelled");
    };
    void open();
    return { close };
  }

  socket(path: string, protocols: string[] = []): WebSocket {
    const { channel } = this.#cockpit;
    const socket = new ChannelSocket({
      path,
      protocols,
      connect: () => channel({ payload: "stream", unix: this.#socket, superuser: "try", binary: true }),
      words: (ended) => this.#words(ended),
    });
    // It has what this console and noVNC use of one.
    return socket as unknown as WebSocket;
  }

  /** An address below Cockpit's own, which passes a request and its response on (doc/protocol.md, "external channels"). */
  document(path: string): string {
    const { transport } = this.#cockpit;
    const open = {
      payload: "http-stream2",
      unix: this.#socket,
      superuser: "try",
      binary: "raw",
      method: "GET",
      path,
      external: { "content-type": "text/html; charset=utf-8" },
    };
    const { pathname } = new URL(transport.uri(`channel/${transport.csrf_token}`));
    return `${pathname}?${btoa(JSON.stringify(open))}`;
  }

  /** Waits for Cockpit, and refuses what would go wrong without a word. */
  async #usable(): Promise<void> {
    await this.#ready;
    if (this.#hasEnded) throw new NoConnection("Cockpit's session has ended: load the page again.");
    // Frames in this page ask Cockpit themselves, and would ask the first host.
    const { host } = this.#cockpit.transport;
    if (host !== null && host !== "localhost")
      throw new NoConnection(`This page works in the Cockpit of its own host: open that of ${host}.`);
  }

  #words({ problem }: Ended): string {
    if (problem === "access-denied")
      return `You may not use ${this.#socket}. Turn on administrative access, at the top of Cockpit.`;
    return (
      `Nothing answers at ${this.#socket}. Turn on administrative access, at the top of Cockpit, and look whether ` +
      "spillwayd runs: systemctl status spillwayd."
    );
  }
}
