// Tests of the reader of server-sent events.
import assert from "node:assert/strict";
import { test } from "node:test";
import { EventReader, MAX_EVENT_CHARACTERS, type StreamEvent } from "../src/cockpit/event-reader.ts";

const encoder = new TextEncoder();

test("events are read however their bytes are divided, with each kind of line end", () => {
  const stream = encoder.encode(
    ': hello\n\nid: 1\ndata: {"a":\ndata: "ü"}\n\ndata\r\n\r\nid:2\rdata:  x\r\rid: bad\0\ndata: same id\n\n' +
      "event: other\ndata: not a message\n\nretry: 5\n\nevent: message\ndata: y\n\ndata: not complete",
  );
  const expected: StreamEvent[] = [
    { data: '{"a":\n"ü"}', id: "1" },
    { data: "", id: "1" },
    { data: " x", id: "2" },
    { data: "same id", id: "2" },
    { data: "y", id: "2" },
  ];
  for (const step of [1, 2, 5, stream.length]) {
    const reader = new EventReader();
    const events: StreamEvent[] = [];
    for (let at = 0; at < stream.length; at += step) {
      events.push(...reader.take(stream.subarray(at, at + step)));
    }
    assert.deepEqual(events, expected, `in parts of ${step}`);
  }
});

test("a stream that goes on keeps the last id", () => {
  assert.deepEqual(new EventReader("7").take(encoder.encode("data: x\n\n")), [{ data: "x", id: "7" }]);
});

test("an event without an end is refused before it fills the memory", () => {
  const part = encoder.encode("x".repeat(MAX_EVENT_CHARACTERS / 2));
  const line = new EventReader();
  line.take(part);
  line.take(part);
  assert.throws(() => line.take(part), /too long/);
  const lines = new EventReader();
  const data = encoder.encode(`data: ${"x".repeat(MAX_EVENT_CHARACTERS / 2)}\n`);
  lines.take(data);
  assert.throws(() => lines.take(data), /too long/);
});
