// The charts of an object: the daemon's history of it if it has one, else what the page has seen itself.
//
// Invariant: the page says which of both it shows, and offers no more of the past than the daemon keeps.
import { useEffect } from "preact/hooks";
import { address, words } from "../api/client.ts";
import { href, queryValue, setQuery } from "../router.ts";
import { type History, sampleKey, timesOf } from "../state/history.ts";
import type { Sample } from "../state/moments.ts";
import { useObject } from "../state/resource.ts";
import { Chart, type Line } from "./chart.tsx";
import { Choice, Notice } from "./parts.tsx";

/** Seconds and their words. The first is shown if the URL says nothing. */
type Span = [number, string];
const SPANS_OF_HOUR: Span[] = [
  [3600, "hour"],
  [900, "15 minutes"],
];
/** The daemon keeps them of catalogs and the host, not of machines. */
const SPANS_OF_DAY: Span[] = [
  [21_600, "6 hours"],
  [86_400, "day"],
];

const SINCE_OPENED = "The charts show what this page has seen since it was opened.";

/** The span that the URL asks for, or the first one if it is not offered. */
export function spanOf(asked: string | undefined, spans: Span[]): number {
  return spans.find(([seconds]) => String(seconds) === asked)?.[0] ?? spans[0]?.[0] ?? 3600;
}

export function HistoryCharts({
  of,
  samples,
}: {
  /** A catalog, or a machine of it. */
  of: { catalog: string; machine?: string };
  samples: Sample[];
}) {
  const spans = of.machine === undefined ? [...SPANS_OF_HOUR, ...SPANS_OF_DAY] : SPANS_OF_HOUR;
  const asked = queryValue("seconds");
  const seconds = spanOf(asked, spans);
  // The URL says what is shown.
  useEffect(() => {
    if (asked !== undefined && String(seconds) !== asked) setQuery({ seconds: undefined });
  }, [asked, seconds]);
  const which = of.machine === undefined ? { catalog: of.catalog } : { machine: of.machine };
  const history = useObject<History>(address("/v1/history", undefined, { ...which, seconds }), 10_000);
  const isEmpty = history.data !== undefined && timesOf(history.data).length === 0;
  const data = isEmpty ? undefined : history.data;
  const times = data ? timesOf(data) : samples.map((s) => s.time);
  const values = (name: string): (number | null)[] => {
    if (!data) return samples.map((s) => s[sampleKey(name)]);
    const found = data.series.find((s) => s.name === name)?.values ?? [];
    // A shorter series ends at the same time as the others.
    return [...Array<null>(times.length - found.length).fill(null), ...found];
  };
  const span = data ? seconds : 600;
  const line = (name: string, title: string, plane: Line["plane"], isArea = false): Line => ({
    name: title,
    plane,
    values: values(name),
    isArea,
  });
  return (
    <>
      <div class="toolbar">
        <Choice
          label="The last"
          name="seconds"
          options={spans.map(([span, title], i) => [i === 0 ? "" : String(span), title])}
        />
        {of.machine === undefined ? null : (
          <p class="hint">
            The daemon keeps an hour of each machine.{" "}
            <a href={href(["catalogs", of.catalog], { tab: "figures" })}>Of its catalog</a> it keeps a day.
          </p>
        )}
      </div>
      {history.error ? (
        <Notice tone="warning">
          <strong>{data ? "The charts are not current." : "The daemon's figures cannot be read."}</strong>{" "}
          {words(history.error).replace(/\.$/, "")}. {data ? null : SINCE_OPENED}
        </Notice>
      ) : isEmpty ? (
        <Notice>
          <strong>The daemon has no figures of it yet.</strong> It keeps them in memory, from a disk's first
          start after its own, and of a limited number of objects. {SINCE_OPENED}
        </Notice>
      ) : null}
      <div class="charts">
        <Chart
          title="Written"
          unit="bytes/s"
          times={times}
          span={span}
          lines={[
            line("guest_written_bytes", "guest", "guest"),
            line("ram_written_bytes", "RAM tier", "ram", true),
            line("overflow_written_bytes", "overflow", "overflow", true),
          ]}
        />
        <Chart
          title="Read"
          unit="bytes/s"
          times={times}
          span={span}
          lines={[
            line("guest_read_bytes", "guest", "guest"),
            line("ram_read_bytes", "RAM tier", "ram", true),
            line("overflow_read_bytes", "overflow", "overflow", true),
            line("base_read_bytes", "base image", "base", true),
          ]}
        />
        <Chart
          title="Used by the write cache"
          unit="bytes"
          times={times}
          span={span}
          lines={[
            line("ram_used_bytes", "RAM tier", "ram", true),
            line("overflow_used_bytes", "overflow", "overflow", true),
          ]}
        />
        <Chart
          title={of.machine ? "Fill" : data ? "Fill of the fullest machine" : "Fill of all machines together"}
          unit="percent"
          times={times}
          span={span}
          lines={[line("fill", "fill", "accent", true)]}
        />
        <Chart
          title="Stalls: writes that waited for space"
          unit="count/s"
          times={times}
          span={span}
          lines={[line("stalls", "stalls", "accent")]}
        />
      </div>
    </>
  );
}
