// How long requests took in the last seconds: the difference of two answers of the daemon, whose counts only grow.
//
// Invariant: both answers are of the same disk. The counts of another one begin at 0.
import type { Schemas } from "../api/client.ts";

export type Latency = Schemas["DiskLatency"];
export type Histogram = Schemas["LatencyHistogram"];
export type Operation = Exclude<keyof Latency, "disk_pid">;

/** An answer, and when it came, in milliseconds. */
export interface LatencyMoment {
  at: number;
  latency: Latency;
}

/** How far back requests are looked at, in milliseconds. */
const SPAN_MS = 10_000;

/** Adds an answer, and leaves out those that are not needed any more. */
export function addMoment(moments: LatencyMoment[], moment: LatencyMoment): LatencyMoment[] {
  const isSame = moments.at(-1)?.latency.disk_pid === moment.latency.disk_pid;
  const all = isSame ? [...moments, moment] : [moment];
  // One that is as old as the span is the beginning of it.
  const first = all.findLastIndex((m) => moment.at - m.at >= SPAN_MS);
  return first > 0 ? all.slice(first) : all;
}

/** Requests between two answers, by ascending bound. */
export function between(before: Histogram, now: Histogram): { bound: number; count: number }[] {
  const was = new Map(before.bounds_ns?.map((bound, i) => [bound, before.counts?.[i] ?? 0]));
  return (now.bounds_ns ?? [])
    .map((bound, i) => ({ bound, count: (now.counts?.[i] ?? 0) - (was.get(bound) ?? 0) }))
    .filter(({ count }) => count > 0);
}

export interface Percentiles {
  p50: number;
  p99: number;
}

/** Percentiles of the requests between two answers, in nanoseconds; null if there were none. */
export function percentiles(before: Histogram, now: Histogram): Percentiles | null {
  const buckets = between(before, now);
  const total = buckets.reduce((sum, { count }) => sum + count, 0);
  if (total === 0) return null;
  const bound = (share: number) => {
    let left = Math.max(1, Math.ceil(total * share));
    for (const { bound, count } of buckets) {
      left -= count;
      if (left <= 0) return bound;
    }
    return 0;
  };
  return { p50: bound(0.5), p99: bound(0.99) };
}
