import assert from "node:assert/strict";
import { test } from "node:test";
import { addMoment, between, type Latency, type LatencyMoment, percentiles } from "../src/state/latency.ts";

const histogram = (...buckets: [number, number][]) => ({
  bounds_ns: buckets.map(([bound]) => bound),
  counts: buckets.map(([, count]) => count),
});

test("percentiles are of the requests between two answers", () => {
  const before = histogram([100, 1000], [900, 7]);
  const now = histogram([100, 1050], [200, 48], [900, 7], [5000, 2]);
  assert.deepEqual(between(before, now), [
    { bound: 100, count: 50 },
    { bound: 200, count: 48 },
    { bound: 5000, count: 2 },
  ]);
  assert.deepEqual(percentiles(before, now), { p50: 100, p99: 5000 });
  assert.deepEqual(percentiles({}, histogram([7, 1])), { p50: 7, p99: 7 });
  assert.equal(percentiles(now, now), null);
});

test("answers of ten seconds are kept, and only those of one disk", () => {
  const moment = (at: number, disk_pid = 1): LatencyMoment => ({ at, latency: { disk_pid } as Latency });
  let moments: LatencyMoment[] = [];
  for (let at = 0; at <= 30_000; at += 2000) {
    moments = addMoment(moments, moment(at));
    assert.ok(moments.length <= 7);
  }
  assert.equal(moments[0]?.at, 20_000);
  // After a pause the time since the last answer before it is looked at.
  moments = addMoment(moments, moment(90_000));
  assert.deepEqual([moments[0]?.at, moments.length], [30_000, 2]);
  assert.equal(addMoment(moments, moment(92_000))[0]?.at, 30_000);
  assert.deepEqual(addMoment(moments, moment(92_000, 2)), [moment(92_000, 2)]);
});
