import assert from "node:assert/strict";
import { test } from "node:test";
import {
  ago,
  bytes,
  count,
  duration,
  nanoseconds,
  parseSize,
  parseWhole,
  percent,
  plural,
  rate,
  sizeText,
  timeToFull,
} from "../src/ui/format.ts";

test("bytes are those of spillway top", () => {
  const cases: [number, string][] = [
    [0, "0 B"],
    [1023, "1023 B"],
    [1024, "1.0 KiB"],
    [4096, "4.0 KiB"],
    [1536 * 1024, "1.5 MiB"],
    [2 ** 40, "1.0 TiB"],
    [1024 ** 2 - 1, "1024.0 KiB"],
  ];
  for (const [n, text] of cases) assert.equal(bytes(n), text);
  assert.equal(rate(null), "-");
  assert.equal(rate(2048), "2.0 KiB/s");
});

test("durations are those of spillway top", () => {
  assert.deepEqual([5, 119, 120, 7199, 7300, 900_000].map(duration), [
    "5 s",
    "119 s",
    "2 min",
    "119 min",
    "2 h 1 min",
    "10 d",
  ]);
  assert.deepEqual([null, 0, 90, 86_400, 86_401].map(timeToFull), [
    "-",
    "full",
    "90 s",
    "24 h 0 min",
    "> 1 d",
  ]);
});

test("a share is never rounded up to what it has not reached", () => {
  assert.equal(percent(0.99999), "99.9%");
  assert.equal(percent(1), "100.0%");
  assert.equal(percent(0.452), "45.2%");
  assert.equal(percent(0.57, 0), "57%");
});

test("sizes are read and written as options take them", () => {
  for (const [text, n] of [
    ["256M", 256 * 2 ** 20],
    ["1G", 2 ** 30],
    ["65536", 65536],
    ["1 GiB", 2 ** 30],
    ["0", 0],
  ] as const) {
    assert.equal(parseSize(text), n);
  }
  for (const text of ["", "M", "1.5G", "-1", "1X"]) assert.equal(typeof parseSize(text), "object", text);
  assert.deepEqual(parseSize("1GB"), { error: "'GB' may mean two sizes: write GiB." });
  assert.deepEqual([0, 65536, 2 ** 20 * 3, 1000].map(sizeText), ["0", "64K", "3M", "1000"]);
});

test("small texts", () => {
  assert.equal(count(1234567), "1\u2009234\u2009567");
  assert.equal(plural(1, "machine"), "1 machine");
  assert.equal(plural(2, "batch", "batches"), "2 batches");
  assert.deepEqual([850, 12_500, 3.2e6, 1.4e9].map(nanoseconds), ["850 ns", "12.5 us", "3.2 ms", "1.4 s"]);
  assert.equal(ago("2026-01-01T00:00:00Z", Date.parse("2026-01-01T00:00:12Z")), "12 s ago");
});

test("a whole number is within its bounds, or it is said what is wrong", () => {
  assert.deepEqual(
    ["1", " 15 ", "100"].map((text) => parseWhole(text, 1, 100)),
    [1, 15, 100],
  );
  for (const text of ["", "x", "-1", "1.5", "1e2"])
    assert.deepEqual(parseWhole(text, 1, 100), { error: "It is a whole number." }, text);
  assert.deepEqual(parseWhole("0", 1, 100), { error: "The least is 1." });
  assert.deepEqual(parseWhole("101", 1, 100), { error: "The most is 100." });
});
