// One host of the fleet: what it is to have of each catalog, what it has reported, and why it does not do what it should.
import {
  Badge,
  Facts,
  Notice,
  PageHead,
  Panel,
  Pending,
  against,
  ApiError,
  ask,
  href,
  lacks,
} from "../shared.ts";
import type { Act } from "../ui/dialog.tsx";
import { bytes } from "../ui/format.ts";
import { cordon, declareDead, drain, livingReason, removeHost, uncordon } from "./host-acts.ts";
import { useFleet, useHost } from "./read.ts";
import { type FleetHost, type FleetShare, HOST_TONE } from "./words.ts";

export function HostState({ host }: { host: FleetHost }) {
  return (
    <span class="counts">
      <Badge tone={HOST_TONE[host.state]}>{host.state}</Badge>
      {host.draining ? (
        <Badge tone="warning">draining</Badge>
      ) : host.cordoned ? (
        <Badge tone="warning">cordoned</Badge>
      ) : null}
    </span>
  );
}

/** A link to a page of a host, which the daemon that serves the console asks for it. */
export function hostHref(page: string[], host: string, own: string | undefined): string {
  return href(page, {}, host === own ? null : host);
}

export function ActButton({
  act,
  text = act.verb,
  of,
  reason = null,
}: {
  act: Act;
  text?: string;
  /** What it is about, if a page has several such buttons. */
  of?: string | undefined;
  /** Why it is not possible now; null if it is. */
  reason?: string | null;
}) {
  return (
    <button
      type="button"
      class={act.typed ? "danger-plain" : undefined}
      aria-label={of && `${text} ${of}`}
      {...against(lacks("admin") ?? reason)}
      onClick={() => ask(act)}
    >
      {text}
    </button>
  );
}

/** The acts that change whether a host gets machines. */
export function CordonActs({ host, of }: { host: FleetHost; of?: string }) {
  return (
    <>
      <ActButton act={host.cordoned || host.draining ? uncordon(host) : cordon(host)} of={of} />
      <ActButton act={drain(host)} of={of} reason={host.draining ? "It is draining already." : null} />
    </>
  );
}

export function FleetHostPage({ name }: { name: string }) {
  const fleet = useFleet();
  const { data: host, error } = useHost(name);
  const crumbs = [{ text: "Fleet", to: ["fleet"] }];
  if (!host) {
    return (
      <>
        <PageHead title={name} crumbs={crumbs} />
        {error instanceof ApiError && error.code === "not_found" ? (
          <Notice>The fleet has no host {name}.</Notice>
        ) : (
          <Pending error={error} what="the host" />
        )}
      </>
    );
  }
  const labels = Object.entries(host.labels).map(([key, value]) => `${key}=${value}`);
  const living = livingReason(host);
  const own = fleet.data?.host;
  return (
    <>
      <PageHead
        title={name}
        crumbs={crumbs}
        about={
          <span class="counts">
            <HostState host={host} />
            <span>zone {host.zone}</span>
            <a href={hostHref(["machines"], name, own)}>Machines of {name}</a>
            <a href={hostHref([], name, own)}>Host {name}</a>
          </span>
        }
        acts={
          <>
            <CordonActs host={host} />
            <ActButton act={declareDead(host)} reason={living} />
            <ActButton act={removeHost(host)} reason={living && `${living} Stop its daemon first.`} />
          </>
        }
      />
      {host.reason ? <Notice tone="warning">{host.reason}</Notice> : null}
      <Shares shares={host.shares} />
      <Panel title="Host">
        <Facts
          items={[
            ["Memory", memoryText(host)],
            ["Version", host.version ?? "not known: it has no lease"],
            ["Hypervisor", host.hypervisor ?? "-"],
            ["Address for other hosts", host.address ? <code key="address">{host.address}</code> : "-"],
            ["Labels", labels.join(", ") || "none"],
            ["Epoch", host.epoch == null ? "-" : String(host.epoch)],
          ]}
        />
      </Panel>
    </>
  );
}

/** Memory that machines of the fleet take on a host, of what they may. */
export function memoryText({ used_bytes, memory_bytes }: FleetHost): string {
  return memory_bytes == null
    ? `${bytes(used_bytes)} of ?`
    : `${bytes(used_bytes)} of ${bytes(memory_bytes)}`;
}

/** The heads of columns that all tables of shares have. */
export const SHARE_HEADS = ["Version", "Wanted", "Has", "Ready", "Updated", "Claimed", "Failed"];

/** The same columns of a share. */
export function ShareCells({ share }: { share: FleetShare }) {
  const { version, wanted, count, ready, off, updated, claimed, failed } = share;
  return (
    <>
      <td class="figure">{version}</td>
      <td class="figure">{wanted}</td>
      <td class="figure">
        {count}
        {off ? ` (${off} off)` : ""}
      </td>
      <td class="figure">{ready}</td>
      <td class="figure">{updated}</td>
      <td class="figure">{claimed}</td>
      <td class="figure">{failed ? <Badge tone="critical">{failed}</Badge> : failed}</td>
    </>
  );
}

function Shares({ shares }: { shares: FleetShare[] }) {
  return (
    <Panel title="Catalogs" aside="as reported at most ten seconds ago" flush>
      <table aria-label="Catalogs">
        <thead>
          <tr>
            <th scope="col">Catalog</th>
            {SHARE_HEADS.map((head) => (
              <th key={head} scope="col" class="figure">
                {head}
              </th>
            ))}
            <th scope="col">Refused because</th>
          </tr>
        </thead>
        <tbody>
          {shares.map((share) => (
            <tr key={share.catalog}>
              <th scope="row">
                <a href={href(["fleet-catalogs", share.catalog])}>{share.catalog}</a>
              </th>
              <ShareCells share={share} />
              <td>{share.refused ? <span class="long-text">{share.refused}</span> : "-"}</td>
            </tr>
          ))}
          {shares.length ? null : (
            <tr class="none">
              <td colSpan={SHARE_HEADS.length + 2}>It has no machines of the fleet.</td>
            </tr>
          )}
        </tbody>
      </table>
    </Panel>
  );
}
