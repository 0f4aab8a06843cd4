// The daemon's history of an object, and how it becomes the samples that small pictures show.
//
// Invariant: a value that is not known stays unknown; it becomes 0 only in pictures that have no gaps.
import type { Sample } from "./moments.ts";

export interface History {
  until: string;
  step_seconds: number;
  series: { name: string; values: (number | null)[] }[];
}

/** The time of each value of a history, in seconds since the epoch. */
export function timesOf(history: History): number[] {
  const length = Math.max(0, ...history.series.map((s) => s.values.length));
  const until = Date.parse(history.until) / 1000;
  return Array.from({ length }, (_, i) => until - (length - 1 - i) * history.step_seconds);
}

const OF_SAMPLES: Record<string, keyof Sample> = {
  guest_read_bytes: "guestRead",
  guest_written_bytes: "guestWritten",
  ram_read_bytes: "ramRead",
  ram_written_bytes: "ramWritten",
  overflow_read_bytes: "overflowRead",
  overflow_written_bytes: "overflowWritten",
  base_read_bytes: "baseRead",
  stalls: "stalls",
  ram_used_bytes: "ramUsed",
  overflow_used_bytes: "overflowUsed",
  fill: "fill",
};

/** The member of a sample that has the values of a series. */
export function sampleKey(name: string): keyof Sample {
  return OF_SAMPLES[name] ?? "time";
}

/** A history as samples, oldest first. Moments of which nothing is known are left out. */
export function samplesOf(history: History): Sample[] {
  const times = timesOf(history);
  const samples: Sample[] = [];
  times.forEach((time, i) => {
    const sample: Sample = {
      time,
      guestRead: 0,
      guestWritten: 0,
      ramRead: 0,
      ramWritten: 0,
      overflowRead: 0,
      overflowWritten: 0,
      baseRead: 0,
      stalls: 0,
      ramUsed: 0,
      overflowUsed: 0,
      fill: 0,
    };
    let isKnown = false;
    for (const { name, values } of history.series) {
      const value = values[i - (times.length - values.length)];
      const key = OF_SAMPLES[name];
      if (value == null || !key) continue;
      sample[key] = value;
      isKnown = true;
    }
    if (isKnown) samples.push(sample);
  });
  return samples;
}
