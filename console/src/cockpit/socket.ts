// A WebSocket of the daemon over a channel of Cockpit, which carries bytes of the daemon's unix socket. It looks like the browser's
// WebSocket, as far as the consoles of machines and noVNC use one.
//
// Invariant: after the event "close" nothing is called and nothing is sent any more. There is one such event.
import type { Channel, Ended } from "./cockpit";
import {
  FrameReader,
  frame,
  type Handshake,
  handshake,
  type Message,
  ProtocolError,
  readHead,
  type Sendable,
} from "./frames.ts";

const CONNECTING = 0;
const OPEN = 1;
const CLOSING = 2;
const CLOSED = 3;
/** Codes of section 7.4.1 of RFC 6455. */
const NORMAL = 1000;
const PROTOCOL_ERROR = 1002;
const ABNORMAL = 1006;
/** How long the other side may take to answer a close. */
const GOODBYE_MS = 1000;

export interface SocketOptions {
  path: string;
  protocols: string[];
  /** Opens the channel. */
  connect(): Channel;
  /** Why a channel has ended, in words. */
  words(ended: Ended): string;
}

export class ChannelSocket extends EventTarget {
  binaryType = "arraybuffer";
  protocol = "";
  readyState = CONNECTING;
  onopen: ((event: Event) => void) | null = null;
  onmessage: ((event: MessageEvent) => void) | null = null;
  onclose: ((event: CloseEvent) => void) | null = null;
  onerror: ((event: Event) => void) | null = null;
  readonly #options: SocketOptions;
  readonly #frames = new FrameReader();
  #channel: Channel | null = null;
  /** Bytes of the response to the handshake, until it is complete. */
  #head: Uint8Array | null = new Uint8Array(0);
  #timer: ReturnType<typeof setTimeout> | undefined;

  constructor(options: SocketOptions) {
    super();
    this.#options = options;
    handshake(options.path, options.protocols).then(
      (opening) => this.#connect(opening),
      () => this.#end(ABNORMAL, "the browser computes no digests here: open Cockpit over https"),
    );
  }

  send(data: string | ArrayBuffer | Uint8Array): void {
    if (this.readyState === CONNECTING) throw new DOMException("It is not open yet", "InvalidStateError");
    if (this.readyState !== OPEN) return;
    if (typeof data === "string") this.#write({ kind: "text", bytes: new TextEncoder().encode(data) });
    else this.#write({ kind: "binary", bytes: new Uint8Array(data) });
  }

  close(): void {
    if (this.readyState === CONNECTING) this.#end(ABNORMAL, "");
    if (this.readyState !== OPEN) return;
    this.readyState = CLOSING;
    this.#write({ kind: "close", code: NORMAL });
    this.#timer = setTimeout(() => this.#end(ABNORMAL, ""), GOODBYE_MS);
  }

  #connect({ request, accept }: Handshake): void {
    if (this.readyState === CLOSED) return;
    const channel = this.#options.connect();
    this.#channel = channel;
    channel.addEventListener("message", (_, data) => this.#take(data, accept));
    channel.addEventListener("close", (_, ended) => this.#end(ABNORMAL, this.#options.words(ended)));
    channel.send(request);
  }

  #take(data: Uint8Array, accept: string): void {
    if (this.readyState === CLOSED) return;
    try {
      let bytes: Uint8Array | null = data;
      if (this.#head) bytes = this.#open(data, this.#head, accept);
      if (!bytes) return;
      for (const message of this.#frames.take(bytes)) {
        this.#came(message);
        // What comes behind the end of a WebSocket is not of it.
        if (this.readyState >= CLOSED) return;
      }
    } catch (error) {
      if (!(error instanceof ProtocolError)) throw error;
      if (this.readyState !== CONNECTING) this.#write({ kind: "close", code: PROTOCOL_ERROR });
      this.#dispatch(new Event("error"));
      this.#end(ABNORMAL, error.message);
    }
  }

  /** Bytes behind the head, once it is complete. */
  #open(data: Uint8Array, before: Uint8Array, accept: string): Uint8Array | null {
    const head = new Uint8Array(before.length + data.length);
    head.set(before);
    head.set(data, before.length);
    this.#head = head;
    const opened = readHead(head, accept, this.#options.protocols);
    if (!opened) return null;
    this.#head = null;
    this.protocol = opened.protocol;
    this.readyState = OPEN;
    this.#dispatch(new Event("open"));
    return opened.rest;
  }

  #came(message: Message): void {
    switch (message.kind) {
      case "ping":
        if (this.readyState === OPEN) this.#write({ kind: "pong", bytes: message.bytes });
        break;
      case "pong":
        break;
      case "close":
        if (this.readyState === OPEN) this.#write({ kind: "close", code: NORMAL });
        this.#end(message.code, message.reason);
        break;
      case "text":
        this.#dispatch(new MessageEvent("message", { data: message.text }));
        break;
      case "binary":
        // The message has memory of its own
        this.#dispatch(new MessageEvent("message", { data: message.bytes.buffer }));
    }
  }

  #write(message: Sendable): void {
    this.#channel?.send(frame(message));
  }

  #end(code: number, reason: string): void {
    if (this.readyState === CLOSED) return;
    this.readyState = CLOSED;
    clearTimeout(this.#timer);
    this.#channel?.close();
    this.#dispatch(new CloseEvent("close", { code, reason, wasClean: code !== ABNORMAL }));
  }

  #dispatch(event: Event): void {
    if (event.type === "open") this.onopen?.(event);
    else if (event.type === "error") this.onerror?.(event);
    else if (event instanceof MessageEvent) this.onmessage?.(event);
    else if (event instanceof CloseEvent) this.onclose?.(event);
    this.dispatchEvent(event);
  }
}
