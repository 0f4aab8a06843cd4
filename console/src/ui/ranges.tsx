// Where the guest of a machine has written most since the last reset.
//
// Invariant: an offset is also there as a whole number of bytes, so that it can be copied into a calculation.
import type { Schemas } from "../api/client.ts";
import { useObject } from "../state/resource.ts";
import { now } from "../state/visible.ts";
import { bytes, duration, plural } from "./format.ts";
import { Badge, Command, Empty, Panel, Pending } from "./parts.tsx";

const EVERY_MS = 10_000;
const SHOWN = 8;

export function RangesPanel({ machine }: { machine: string }) {
  const { data, at, error } = useObject<Schemas["DirtyRanges"]>(
    `/v1/machines/${encodeURIComponent(machine)}/dirty-ranges?limit=${SHOWN}`,
    EVERY_MS,
  );
  return (
    <Panel
      title="Written most"
      aside={
        data && at !== null ? (
          <>
            {error ? <Badge tone="warning">last known figures</Badge> : null} {bytes(data.written_bytes)}{" "}
            since the reset, {age(at, now.value)}
          </>
        ) : null
      }
      flush
    >
      {!data ? (
        <Pending error={error} what="the ranges" />
      ) : data.ranges.length === 0 ? (
        <Empty>When this was read, nothing had been written since the last reset.</Empty>
      ) : (
        <Ranges of={data} machine={machine} />
      )}
    </Panel>
  );
}

/** How old ranges are: other figures of the page are newer. */
export function age(at: number, now: number): string {
  const seconds = (now - at) / 1000;
  return seconds < 1 ? "read now" : `read ${duration(seconds)} ago`;
}

function times({ length_bytes, written_bytes }: Schemas["DirtyRange"]): string {
  const n = length_bytes > 0 ? written_bytes / length_bytes : 0;
  return n > 0 && n < 0.1 ? "< 0.1" : n.toFixed(1);
}

function Ranges({ of, machine }: { of: Schemas["DirtyRanges"]; machine: string }) {
  const most = of.ranges[0]?.written_bytes ?? 0;
  const rest = of.ranges_total - of.ranges.length;
  return (
    <>
      <svg
        class="ranges-bar"
        viewBox="0 0 1000 10"
        preserveAspectRatio="none"
        role="img"
        aria-label={`Where on the disk of ${bytes(of.size_bytes)} they are`}
      >
        <rect class="track" width="1000" height="10" />
        {of.ranges.map((r) => (
          <rect
            key={r.offset_bytes}
            class="fill guest"
            x={(r.offset_bytes / of.size_bytes) * 1000}
            width={Math.max(2, (r.length_bytes / of.size_bytes) * 1000)}
            height="10"
            opacity={0.35 + 0.65 * (most > 0 ? r.written_bytes / most : 0)}
          />
        ))}
      </svg>
      <table>
        <thead>
          <tr>
            <th scope="col">From byte</th>
            <th scope="col" class="figure">
              Length
            </th>
            <th scope="col" class="figure" title="Each block counts as often as it was written">
              Written
            </th>
            <th scope="col" class="figure" title="How often each of its bytes was written, on average">
              Times over
            </th>
          </tr>
        </thead>
        <tbody>
          {of.ranges.map((r) => (
            <tr key={r.offset_bytes}>
              <th scope="row" title={`at ${bytes(r.offset_bytes)}`}>
                <code>{r.offset_bytes}</code>
              </th>
              <td class="figure">{bytes(r.length_bytes)}</td>
              <td class="figure">{bytes(r.written_bytes)}</td>
              <td class="figure">{times(r)}</td>
            </tr>
          ))}
        </tbody>
      </table>
      {rest > 0 ? <p class="hint">{plural(rest, "more range")}, written less.</p> : null}
      <Command text={`spillway machine stats ${machine} --dirty`} />
    </>
  );
}
