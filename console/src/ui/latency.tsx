// How long the requests of a disk took in the last seconds, by what served them.
import { useEffect, useState } from "preact/hooks";
import {
  addMoment,
  type Latency,
  type LatencyMoment,
  type Operation,
  percentiles,
} from "../state/latency.ts";
import { useObject } from "../state/resource.ts";
import { nanoseconds } from "./format.ts";
import { Badge, Empty, Panel, Pending } from "./parts.tsx";

const EVERY_MS = 2000;

/** What is measured, in the order of the table. What only some disks do is shown when it happens. */
const OPERATIONS: { key: Operation; name: string; plane: string; isAlways?: true }[] = [
  { key: "read", name: "Guest reads", plane: "guest", isAlways: true },
  { key: "write", name: "Guest writes", plane: "guest", isAlways: true },
  { key: "overflow_read", name: "Overflow reads", plane: "overflow" },
  { key: "overflow_write", name: "Overflow writes", plane: "overflow" },
  { key: "base_read", name: "Base reads that waited", plane: "base" },
  { key: "chunk", name: "Chunks from the registry", plane: "base" },
];

export function LatencyPanel({ machine }: { machine: string }) {
  const { data, error } = useObject<Latency>(`/v1/machines/${encodeURIComponent(machine)}/latency`, EVERY_MS);
  const [moments, setMoments] = useState<LatencyMoment[]>([]);
  useEffect(() => {
    if (data) setMoments((before) => addMoment(before, { at: Date.now(), latency: data }));
  }, [data]);
  const first = moments[0];
  const last = moments.at(-1);
  const seconds = first && last ? (last.at - first.at) / 1000 : 0;
  const aside = error ? (
    <Badge tone="warning">last known figures</Badge>
  ) : seconds > 0 ? (
    `last ${Math.round(seconds)} s`
  ) : null;
  return (
    <Panel title="Latency" aside={aside} flush>
      {first && last && seconds > 0 ? (
        <LatencyTable before={first.latency} now={last.latency} />
      ) : data && !error ? (
        <Empty>Measuring</Empty>
      ) : (
        <Pending error={error} what="the latency" />
      )}
    </Panel>
  );
}

function LatencyTable({ before, now }: { before: Latency; now: Latency }) {
  const rows = OPERATIONS.map((operation) => ({
    ...operation,
    of: percentiles(before[operation.key] ?? {}, now[operation.key] ?? {}),
  })).filter(({ isAlways, of }) => isAlways || of);
  return (
    <table>
      <thead>
        <tr>
          <th scope="col">Requests</th>
          <th scope="col" class="figure">
            Median
          </th>
          <th scope="col" class="figure" title="99 of 100 requests took no longer">
            99% within
          </th>
        </tr>
      </thead>
      <tbody>
        {rows.map(({ key, name, plane, of }) => (
          <tr key={key}>
            <th scope="row">
              <span class={`swatch ${plane}`} aria-hidden="true" /> {name}
            </th>
            <td class="figure">{of ? nanoseconds(of.p50) : "-"}</td>
            <td class="figure">{of ? nanoseconds(of.p99) : "-"}</td>
          </tr>
        ))}
      </tbody>
    </table>
  );
}
