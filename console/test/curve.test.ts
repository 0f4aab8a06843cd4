import assert from "node:assert/strict";
import { test } from "node:test";
import type { Curve } from "../src/api/client.ts";
import { absorbed, at, ofCatalog, ofDisk, scale } from "../src/state/curve.ts";

function curve(points: [number, number][], zero: number, written = 1000): Curve {
  return {
    seconds: 10,
    sampled_one_in: 1,
    curve: points.map(([ram, bytes]) => ({
      ram_bytes: ram,
      overflow_write_bytes: bytes,
      overflow_read_bytes: bytes / 2,
      peak_overflow_bytes: 0,
    })),
    zero_overflow_bytes: zero,
    knee_bytes: null,
    recommended_bytes: zero,
    goal: 0.95,
    totals: {
      written_blocks: written / 4096,
      read_blocks: 0,
      base_read_blocks: 0,
      new_blocks: 0,
      peak_live_blocks: 0,
    },
    memory_bytes: 0,
    fill: { seconds: 10, grown_bytes: 0, left_bytes: 0 },
  };
}

const one = curve(
  [
    [100, 1000],
    [200, 500],
    [300, 0],
  ],
  300,
);

test("between two points the curve is a line, as the daemon reads it", () => {
  const { points } = ofDisk(one);
  for (const [ram, written] of [
    [0, 1000],
    [100, 1000],
    [150, 750],
    [200, 500],
    [290, 50],
    [300, 0],
    [1e15, 0],
  ] as const) {
    assert.equal(Math.round(at(points, ram).written), written, String(ram));
  }
  assert.equal(at(points, 150).read, 375);
  assert.deepEqual(at([], 5), { written: 0, read: 0 });
});

test("what RAM absorbs", () => {
  const sizing = ofDisk(one);
  assert.equal(absorbed(sizing, 200), 0.5);
  assert.equal(absorbed(sizing, 300), 1);
  assert.equal(absorbed({ ...sizing, writtenBytes: 0 }, 300), null);
});

test("the slider reaches beyond all that matters", () => {
  const sizing = ofDisk(curve([[2 ** 20, 10]], 2 ** 30));
  const { step, max } = scale(sizing, 2 ** 28);
  assert.ok(max >= 2 ** 30 * 1.2 && max % step === 0 && max / step <= 256);
});

test("the curve of a catalog is the sum of those of its disks, and says how many", () => {
  const { totals: _, memory_bytes: __, fill: ___, ...shared } = one;
  const both = { ...shared, machines: 5, disks: 2, written_bytes: 2000 };
  assert.deepEqual(ofCatalog(both), { ...ofDisk(one), machines: 2, writtenBytes: 2000 });
  assert.deepEqual([ofDisk(one).machines, ofDisk(one).writtenBytes, ofDisk(one).kneeBytes], [1, 1000, null]);
  assert.equal(ofCatalog({ ...both, knee_bytes: 200 }).kneeBytes, 200);
});
