// The client's side of the WebSocket protocol (RFC 6455): the opening handshake and frames, as bytes. Owns no connection.
//
// Invariant: all that the other side sends is checked. Each length has a bound before memory is taken for it, and what the
// standard forbids is a ProtocolError.

/** What the other side has sent is against the protocol, or too long. */
export class ProtocolError extends Error {}

/** Most bytes of a message, over all of its fragments. The daemon sends less. */
export const MAX_MESSAGE_BYTES = 4 << 20;
/** Most bytes of the response to the handshake. */
export const MAX_HEAD_BYTES = 16 << 10;

/** A constant of section 1.3. */
const GUID = "258EAFA5-E914-47DA-95CA-C5AB0DC85B11";

const CONTINUATION = 0;
const TEXT = 1;
const BINARY = 2;
const CLOSE = 8;
const PING = 9;
const PONG = 10;

export type Sendable =
  | { kind: "text" | "binary" | "ping" | "pong"; bytes: Uint8Array }
  | { kind: "close"; code: number };

export type Message =
  | { kind: "text"; text: string }
  | { kind: "binary" | "ping" | "pong"; bytes: Uint8Array }
  /** Without a code: 1005, as section 7.1.5 says. */
  | { kind: "close"; code: number; reason: string };

export interface Handshake {
  request: Uint8Array;
  /** The value that Sec-WebSocket-Accept must have. */
  accept: string;
}

function base64(bytes: Uint8Array): string {
  return btoa(String.fromCharCode(...bytes));
}

/** A request that opens a WebSocket at a path (section 4.1). The digest needs a page over https or of this computer. */
export async function handshake(path: string, protocols: string[]): Promise<Handshake> {
  const key = base64(crypto.getRandomValues(new Uint8Array(16)));
  const digest = await crypto.subtle.digest("SHA-1", new TextEncoder().encode(key + GUID));
  const lines = [
    `GET ${path} HTTP/1.1`,
    "Host: localhost",
    "Upgrade: websocket",
    "Connection: Upgrade",
    `Sec-WebSocket-Key: ${key}`,
    "Sec-WebSocket-Version: 13",
    ...(protocols.length ? [`Sec-WebSocket-Protocol: ${protocols.join(", ")}`] : []),
  ];
  if (lines.some((line) => /[^\x20-\x7e]/.test(line)) || /\s/.test(path))
    throw new ProtocolError("the path or a protocol has a character that no request has");
  return {
    request: new TextEncoder().encode(`${lines.join("\r\n")}\r\n\r\n`),
    accept: base64(new Uint8Array(digest)),
  };
}

export interface Opened {
  /** The protocol that the server chose, or "". */
  protocol: string;
  /** Bytes behind the response: the beginning of the frames. */
  rest: Uint8Array;
}

/** Reads the server's response from all bytes so far. Null: it is not complete. */
export function readHead(bytes: Uint8Array, accept: string, protocols: string[]): Opened | null {
  const text = new TextDecoder("latin1").decode(bytes.subarray(0, MAX_HEAD_BYTES));
  const end = text.indexOf("\r\n\r\n");
  if (end < 0) {
    if (bytes.length >= MAX_HEAD_BYTES) throw new ProtocolError("the response to the handshake is too long");
    return null;
  }
  const [first = "", ...lines] = text.slice(0, end).split("\r\n");
  const status = first.match(/^HTTP\/1\.1 (\d{3})(?: |$)/)?.[1];
  if (status !== "101") throw new ProtocolError(`spillwayd has refused it (status ${status ?? "unknown"})`);
  const fields = new Map<string, string>();
  for (const line of lines) {
    const colon = line.indexOf(":");
    const name = line.slice(0, colon).toLowerCase();
    if (colon < 1 || fields.has(name)) throw new ProtocolError("a header of the handshake is malformed");
    fields.set(name, line.slice(colon + 1).trim());
  }
  const protocol = fields.get("sec-websocket-protocol") ?? "";
  const isUpgrade =
    fields.get("upgrade")?.toLowerCase() === "websocket" &&
    fields.get("connection")?.toLowerCase() === "upgrade";
  if (!isUpgrade || fields.get("sec-websocket-accept") !== accept)
    throw new ProtocolError("the response to the handshake is that of another request");
  if (fields.has("sec-websocket-extensions") || (protocol !== "" && !protocols.includes(protocol)))
    throw new ProtocolError("the server uses an extension or a protocol that was not asked for");
  return { protocol, rest: bytes.slice(end + 4) };
}

const OPCODES = { text: TEXT, binary: BINARY, ping: PING, pong: PONG, close: CLOSE };

/** A message as one frame, masked with four random bytes (section 5.3). */
export function frame(message: Sendable): Uint8Array {
  const payload =
    message.kind === "close" ? Uint8Array.of(message.code >> 8, message.code & 255) : message.bytes;
  const length = payload.length;
  const extra = length < 126 ? 0 : length < 0x10000 ? 2 : 8;
  const bytes = new Uint8Array(2 + extra + 4 + length);
  const view = new DataView(bytes.buffer);
  bytes[0] = 0x80 | OPCODES[message.kind];
  bytes[1] = 0x80 | (extra === 0 ? length : extra === 2 ? 126 : 127);
  if (extra === 2) view.setUint16(2, length);
  if (extra === 8) view.setBigUint64(2, BigInt(length));
  const mask = crypto.getRandomValues(bytes.subarray(2 + extra, 6 + extra));
  for (let i = 0; i < length; i++) bytes[6 + extra + i] = (payload[i] ?? 0) ^ (mask[i & 3] ?? 0);
  return bytes;
}

interface Head {
  opcode: number;
  isFinal: boolean;
  length: number;
}

/** Puts messages together from bytes as they come, however they are divided. */
export class FrameReader {
  /** Bytes of a frame's head that is not complete: at most 10. */
  #head: number[] = [];
  #frame: Head | null = null;
  /** The payload of the frame, and how much of it has come. */
  #payload = new Uint8Array(0);
  #filled = 0;
  /** The data message whose last fragment has not come. */
  #opcode: number | null = null;
  #fragments: Uint8Array[] = [];
  #bytes = 0;

  /** Messages that are complete with these bytes. */
  take(bytes: Uint8Array): Message[] {
    const messages: Message[] = [];
    let at = 0;
    // A frame without payload is complete with its head.
    while (at < bytes.length || this.#frame?.length === this.#filled) {
      if (this.#frame === null) {
        this.#head.push(bytes[at++] ?? 0);
        this.#frame = this.#readHead();
        if (this.#frame) this.#payload = new Uint8Array(this.#frame.length);
        this.#filled = 0;
        continue;
      }
      const part = bytes.subarray(at, at + this.#frame.length - this.#filled);
      this.#payload.set(part, this.#filled);
      this.#filled += part.length;
      at += part.length;
      if (this.#filled < this.#frame.length) break;
      const message = this.#end(this.#frame, this.#payload);
      if (message) messages.push(message);
      this.#frame = null;
    }
    return messages;
  }

  /** Section 5.2. Null: more bytes are needed. */
  #readHead(): Head | null {
    const [first = 0, second = 0] = this.#head;
    const had = this.#head.length;
    if (had < 2) return null;
    const opcode = first & 15;
    const isFinal = first > 127;
    if (first & 0x70) throw new ProtocolError("a frame has bits of an extension");
    if (second > 127) throw new ProtocolError("a frame of a server is masked");
    if ((opcode > BINARY && opcode < CLOSE) || opcode > PONG)
      throw new ProtocolError("a frame has an unknown type");
    if (opcode >= CLOSE && (!isFinal || second > 125))
      throw new ProtocolError("a control frame is fragmented or too long");
    const extra = second < 126 ? 0 : second === 126 ? 2 : 8;
    if (had < 2 + extra) return null;
    let length = second;
    if (extra) length = this.#head.slice(2).reduce((sum, byte) => sum * 256 + byte, 0);
    if (extra && length < (extra === 2 ? 126 : 0x10000))
      throw new ProtocolError("a length is longer than it needs to be");
    if (opcode < CLOSE) {
      if ((opcode === CONTINUATION) !== (this.#opcode !== null))
        throw new ProtocolError("fragments of messages are mixed");
      if (length > MAX_MESSAGE_BYTES - this.#bytes) throw new ProtocolError("a message is too long");
    }
    this.#head = [];
    return { opcode, isFinal, length };
  }

  #end({ opcode, isFinal }: Head, payload: Uint8Array): Message | null {
    if (opcode === CLOSE) return closing(payload);
    if (opcode >= CLOSE) return { kind: opcode === PING ? "ping" : "pong", bytes: payload };
    this.#opcode ??= opcode;
    this.#fragments.push(payload);
    this.#bytes += payload.length;
    // Fragments without content would be kept for ever.
    if (this.#fragments.length > MAX_FRAGMENTS) throw new ProtocolError("a message has too many fragments");
    if (!isFinal) return null;
    const kind = this.#opcode;
    const bytes = this.#joined();
    this.#opcode = null;
    this.#fragments = [];
    this.#bytes = 0;
    return kind === TEXT ? { kind: "text", text: utf8(bytes) } : { kind: "binary", bytes };
  }

  #joined(): Uint8Array {
    const [only] = this.#fragments;
    if (only && this.#fragments.length === 1) return only;
    const bytes = new Uint8Array(this.#bytes);
    let at = 0;
    for (const fragment of this.#fragments) {
      bytes.set(fragment, at);
      at += fragment.length;
    }
    return bytes;
  }
}

const MAX_FRAGMENTS = 4096;

function utf8(bytes: Uint8Array): string {
  try {
    return new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(bytes);
  } catch {
    throw new ProtocolError("a text is no UTF-8");
  }
}

/** Section 5.5.1, and the codes of section 7.4 that may be sent. */
function closing(payload: Uint8Array): Message {
  if (payload.length === 0) return { kind: "close", code: 1005, reason: "" };
  const code = ((payload[0] ?? 0) << 8) | (payload[1] ?? 0);
  const isSent = (code >= 1000 && code <= 1014 && ![1004, 1005, 1006].includes(code)) || code >= 3000;
  if (payload.length === 1 || !isSent || code > 4999) throw new ProtocolError("a closing frame is malformed");
  return { kind: "close", code, reason: utf8(payload.subarray(2)) };
}
