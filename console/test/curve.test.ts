import assert from "node:assert/strict";
import { test } from "node:test";
import type { Curve } from "../src/api/client.ts";
import { absorbed, at, ofCatalog, scale, sum } from "../src/state/curve.ts";

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
  const points = sum([one])?.points ?? [];
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

test("several curves: sums, and the size at which none overflows", () => {
  const large = curve(
    [
      [100, 900],
      [1000, 100],
    ],
    2000,
  );
  const both = sum([one, large]);
  assert.equal(both?.machines, 2);
  assert.equal(both?.zeroBytes, 2000);
  assert.equal(both?.writtenBytes, 2000);
  assert.equal(at(both?.points ?? [], 100).written, 1900);
  assert.equal(at(both?.points ?? [], 1000).written, 100);
  assert.equal(sum([]), null);
});

test("many points are thinned, and the ends stay", () => {
  const many = sum([
    curve(
      Array.from({ length: 500 }, (_, i) => [i + 1, 500 - i]),
      500,
    ),
  ]);
  assert.ok((many?.points.length ?? 0) <= 96);
  assert.equal(many?.points[0]?.ram, 1);
  assert.equal(many?.points.at(-1)?.ram, 500);
});

test("what RAM absorbs", () => {
  const sizing = sum([one]);
  assert.ok(sizing);
  assert.equal(absorbed(sizing, 200), 0.5);
  assert.equal(absorbed(sizing, 300), 1);
  assert.equal(absorbed({ ...sizing, writtenBytes: 0 }, 300), null);
});

test("the slider reaches beyond all that matters", () => {
  const sizing = sum([curve([[2 ** 20, 10]], 2 ** 30)]);
  assert.ok(sizing);
  const { step, max } = scale(sizing, 2 ** 28);
  assert.ok(max >= 2 ** 30 * 1.2 && max % step === 0 && max / step <= 256);
});

test("the curve of a catalog is read as a sum of curves", () => {
  const both = sum([one, one]);
  const curve = {
    machines: 5,
    disks: 2,
    seconds: 10,
    sampled_one_in: 1,
    curve: one.curve.map((p) => ({
      ...p,
      overflow_write_bytes: 2 * p.overflow_write_bytes,
      overflow_read_bytes: 2 * p.overflow_read_bytes,
    })),
    zero_overflow_bytes: 300,
    recommended_bytes: 300,
    goal: 0.95,
    written_bytes: 2000,
  };
  assert.deepEqual(ofCatalog(curve), both);
  assert.equal(ofCatalog({ ...curve, knee_bytes: 200 }).kneeBytes, 200);
});
