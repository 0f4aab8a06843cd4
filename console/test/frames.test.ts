// Tests of the WebSocket protocol by the sections of RFC 6455.
import assert from "node:assert/strict";
import { test } from "node:test";
import {
  FrameReader,
  frame,
  handshake,
  MAX_HEAD_BYTES,
  MAX_MESSAGE_BYTES,
  type Message,
  ProtocolError,
  readHead,
} from "../src/cockpit/frames.ts";

const bytes = (text: string) => new TextEncoder().encode(text);
const text = (array: Uint8Array) => new TextDecoder().decode(array);

/** A frame as a server sends it: not masked. */
function served(opcode: number, payload: Uint8Array, isFinal = true): Uint8Array {
  const { length } = payload;
  const head = [(isFinal ? 0x80 : 0) | opcode];
  if (length < 126) head.push(length);
  else if (length < 0x10000) head.push(126, length >> 8, length & 255);
  else head.push(127, 0, 0, 0, 0, length >>> 24, (length >> 16) & 255, (length >> 8) & 255, length & 255);
  return Uint8Array.from([...head, ...payload]);
}

const joined = (...parts: Uint8Array[]) => Uint8Array.from(parts.flatMap((part) => [...part]));

function refuses(what: RegExp, ...parts: Uint8Array[]): void {
  const reader = new FrameReader();
  assert.throws(
    () => parts.forEach((part) => void reader.take(part)),
    (error) => error instanceof ProtocolError && what.test(error.message),
  );
}

test("4.1: the request has what a server needs, with a key of its own each time", async () => {
  const [one, other] = await Promise.all([handshake("/v1/x?a=b", ["binary"]), handshake("/v1/x", [])]);
  const key = text(one.request).match(/\r\nSec-WebSocket-Key: ([A-Za-z0-9+/]{22}==)\r\n/)?.[1];
  assert.ok(key);
  assert.match(text(one.request), /^GET \/v1\/x\?a=b HTTP\/1\.1\r\nHost: localhost\r\n/);
  assert.match(text(one.request), /\r\nSec-WebSocket-Protocol: binary\r\n\r\n$/);
  assert.ok(!text(other.request).includes(key) && !text(other.request).includes("Protocol"));
});

test("4.1: a path or a protocol adds no header and no request", async () => {
  for (const path of ["/a b", "/a\r\nX: y", "/ä"]) await assert.rejects(handshake(path, []), ProtocolError);
  await assert.rejects(handshake("/", ["a\r\nX: y"]), ProtocolError);
});

const HEAD = "HTTP/1.1 101 Switching Protocols\r\nconnection: Upgrade\r\nUpgrade: websocket\r\n";

test("4.1: the answer to the example's key is taken, in any division", async () => {
  const accept = "s3pPLMBiTxaQ9kYGzzhZRbK+xOo=";
  const whole = bytes(`${HEAD}Sec-WebSocket-Accept: ${accept}\r\nsec-websocket-protocol: binary\r\n\r\nrest`);
  for (let end = 0; end < whole.length - 4; end++)
    assert.equal(readHead(whole.subarray(0, end), accept, ["binary"]), null);
  const opened = readHead(whole, accept, ["binary"]);
  assert.equal(opened?.protocol, "binary");
  assert.equal(text(opened?.rest ?? bytes("none")), "rest");
});

test("4.1: the digest is that of section 1.3", async (t) => {
  t.mock.method(crypto, "getRandomValues", (array: Uint8Array) => {
    array.set(bytes("the sample nonce"));
    return array;
  });
  const { accept, request } = await handshake("/", []);
  assert.match(text(request), /Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==/);
  assert.equal(accept, "s3pPLMBiTxaQ9kYGzzhZRbK+xOo=");
});

test("4.1: an answer that is not to this request is refused", () => {
  const accept = "Sec-WebSocket-Accept: right\r\n";
  const bad = [
    "HTTP/1.1 200 OK\r\n\r\n",
    "HTTP/1.1 1010 X\r\n\r\n",
    "HTTP/1.0 101 X\r\n\r\n",
    "SSH-2.0-OpenSSH\r\n\r\n",
    `${HEAD}\r\n`,
    `${HEAD}Sec-WebSocket-Accept: wrong\r\n\r\n`,
    `${HEAD}${accept}${accept}\r\n`,
    `${HEAD}${accept}no colon\r\n\r\n`,
    `${HEAD}${accept}Sec-WebSocket-Extensions: permessage-deflate\r\n\r\n`,
    `${HEAD}${accept}Sec-WebSocket-Protocol: other\r\n\r\n`,
    `HTTP/1.1 101 X\r\nUpgrade: websocket\r\n${accept}\r\n`,
  ];
  for (const head of bad)
    assert.throws(() => readHead(bytes(head), "right", ["binary"]), ProtocolError, head);
  assert.ok(readHead(bytes(`${HEAD}${accept}\r\n`), "right", ["binary"]));
});

test("an answer without an end is refused before it fills the memory", () => {
  const long = bytes("HTTP/1.1 101 X\r\n").length;
  const endless = bytes(`HTTP/1.1 101 X\r\n${"x".repeat(MAX_HEAD_BYTES - long)}`);
  assert.equal(readHead(endless.subarray(1), "", []), null);
  assert.throws(() => readHead(endless, "", []), ProtocolError);
});

/** What a server reads: opcode and payload, by the mask. */
function unmasked(sent: Uint8Array): { opcode: number; payload: Uint8Array } {
  assert.equal((sent[1] ?? 0) & 0x80, 0x80, "it is masked");
  const short = (sent[1] ?? 0) & 127;
  const extra = short < 126 ? 0 : short === 126 ? 2 : 8;
  const mask = sent.subarray(2 + extra, 6 + extra);
  return {
    opcode: sent[0] ?? 0,
    payload: sent.subarray(6 + extra).map((byte, i) => byte ^ (mask[i & 3] ?? 0)),
  };
}

test("5.3: what is sent is masked, each frame by other bytes", () => {
  for (const length of [0, 1, 125, 126, 65535, 65536]) {
    const payload = new Uint8Array(length).fill(7);
    const sent = frame({ kind: "binary", bytes: payload });
    assert.deepEqual(unmasked(sent), { opcode: 0x82, payload });
    // Without a mask it is what a reader reads, with the length in the shortest form.
    const plain = joined(sent.subarray(0, sent.length - length - 4), payload);
    plain[1] = (plain[1] ?? 0) & 127;
    assert.deepEqual(plain, served(2, payload));
  }
  assert.deepEqual(unmasked(frame({ kind: "close", code: 1002 })).payload, Uint8Array.of(3, 234));
  assert.equal(unmasked(frame({ kind: "text", bytes: bytes("a") })).opcode, 0x81);
  const masks = new Set([1, 2, 3, 4].map(() => frame({ kind: "ping", bytes: bytes("") }).join()));
  assert.equal(masks.size, 4);
});

test("5.4: messages are put together however they are divided", () => {
  const long = new Uint8Array(70_000).map((_, i) => i);
  const stream = joined(
    served(2, long),
    served(1, bytes("grü"), false),
    served(9, bytes("now")),
    served(0, bytes("ße"), false),
    served(0, bytes("")),
    served(2, bytes("")),
    served(10, bytes("")),
    served(8, joined(Uint8Array.of(3, 233), bytes("the machine's run has ended"))),
  );
  const expected: Message[] = [
    { kind: "binary", bytes: long },
    { kind: "ping", bytes: bytes("now") },
    { kind: "text", text: "grüße" },
    { kind: "binary", bytes: bytes("") },
    { kind: "pong", bytes: bytes("") },
    { kind: "close", code: 1001, reason: "the machine's run has ended" },
  ];
  for (const step of [1, 2, 3, 7, 4096, stream.length]) {
    const reader = new FrameReader();
    const came: Message[] = [];
    for (let at = 0; at < stream.length; at += step)
      came.push(...reader.take(stream.subarray(at, at + step)));
    assert.deepEqual(came, expected, `in parts of ${step}`);
  }
});

test("5.4: a character may be divided between fragments", () => {
  const umlaut = bytes("ü");
  const reader = new FrameReader();
  reader.take(served(1, umlaut.subarray(0, 1), false));
  assert.deepEqual(reader.take(served(0, umlaut.subarray(1))), [{ kind: "text", text: "ü" }]);
});

test("5.2: what a server must not send is refused", () => {
  refuses(/extension/, Uint8Array.of(0xc2, 0));
  refuses(/masked/, Uint8Array.of(0x82, 0x80, 1, 2, 3, 4));
  for (const opcode of [3, 7, 11, 15]) refuses(/unknown type/, Uint8Array.of(0x80 | opcode, 0));
  refuses(/longer than it needs/, Uint8Array.of(0x82, 126, 0, 125));
  refuses(/longer than it needs/, Uint8Array.of(0x82, 127, 0, 0, 0, 0, 0, 0, 255, 255));
  refuses(/mixed/, served(0, bytes("a")));
  refuses(/mixed/, served(2, bytes("a"), false), served(2, bytes("b")));
  refuses(/control frame/, served(9, bytes("a"), false));
  refuses(/control frame/, served(9, new Uint8Array(126)));
  refuses(/UTF-8/, served(1, Uint8Array.of(0xc0, 0x80)));
});

test("5.5.1: a closing frame has a code that may be sent, or none", () => {
  assert.deepEqual(new FrameReader().take(served(8, bytes(""))), [{ kind: "close", code: 1005, reason: "" }]);
  refuses(/closing frame/, served(8, Uint8Array.of(3)));
  for (const code of [0, 999, 1004, 1005, 1006, 1015, 2999, 5000, 65535])
    refuses(/closing frame/, served(8, Uint8Array.of(code >> 8, code & 255)));
  refuses(/UTF-8/, served(8, Uint8Array.of(3, 232, 255)));
});

test("a length is refused before memory is taken for it", () => {
  refuses(/too long/, Uint8Array.of(0x82, 127, 255, 255, 255, 255, 255, 255, 255, 255));
  refuses(/too long/, Uint8Array.of(0x82, 127, 0, 0, 0, 0, 0, 64, 0, 1));
  assert.equal(MAX_MESSAGE_BYTES, 0x40_0000);
  assert.deepEqual(new FrameReader().take(Uint8Array.of(0x82, 127, 0, 0, 0, 0, 0, 64, 0, 0)), []);
  // The bound is that of the message, not of a fragment.
  const half = served(2, new Uint8Array(MAX_MESSAGE_BYTES / 2 + 1), false);
  half[0] = 2;
  const more = half.slice();
  more[0] = 0;
  refuses(/too long/, half, more);
  const empty = served(0, bytes(""), false);
  refuses(/too many/, served(2, bytes(""), false), joined(...Array<Uint8Array>(5000).fill(empty)));
});

test("random bytes are read or refused, and nothing else", () => {
  let seed = 20261128;
  const random = () => {
    seed = (Math.imul(seed, 1103515245) + 12345) >>> 0;
    return seed >>> 16;
  };
  for (let round = 0; round < 3000; round++) {
    const noise = Uint8Array.from({ length: random() % 40 }, () => random());
    noise[0] = (noise[0] ?? 0) & 0x8f;
    noise[1] = (noise[1] ?? 0) & 0x0f;
    try {
      new FrameReader().take(noise);
    } catch (error) {
      assert.ok(error instanceof ProtocolError, `round ${round}: ${error}`);
    }
  }
});
