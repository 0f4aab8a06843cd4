// The charts of an object: the daemon's history of the last hours if it has one, else what the page has seen itself.
//
// Invariant: the page says which of both it shows.
import { ApiError, address } from "../api/client.ts";
import { queryValue } from "../router.ts";
import { type History, sampleKey, timesOf } from "../state/history.ts";
import type { Sample } from "../state/moments.ts";
import { useObject } from "../state/resource.ts";
import { Chart, type Line } from "./chart.tsx";
import { Choice, Notice } from "./parts.tsx";

export function HistoryCharts({
  of,
  samples,
}: {
  of: { catalog?: string; machine?: string };
  samples: Sample[];
}) {
  const seconds = Number(queryValue("seconds") ?? 3600);
  const history = useObject<History>(address("/v1/history", undefined, { ...of, seconds }), 10_000);
  const isMissing = history.error instanceof ApiError && history.error.code === "not_found";
  const data = isMissing ? undefined : history.data;
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
        {data ? (
          <Choice
            label="The last"
            name="seconds"
            options={[
              ["", "hour"],
              ["900", "15 minutes"],
              ["21600", "6 hours"],
              ["86400", "day"],
            ]}
          />
        ) : isMissing ? (
          <Notice>
            This daemon keeps no history. The charts show what this page has seen since it was opened.
          </Notice>
        ) : null}
      </div>
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
