// What the fleet's pages say in words: states, sums of shares, how far a rollout is.
//
// Invariant: nothing here has a state. What hosts have not reported is not called good.
import type { Schemas } from "../api/client.ts";
import type { Tone } from "../ui/parts.tsx";

export type FleetDetails = Schemas["FleetDetails"];
export type FleetHost = Schemas["FleetHost"];
export type FleetShare = Schemas["FleetShare"];
/** A rollout over the hosts of a catalog, in waves. */
export interface FleetRollout {
  state: string;
  reason?: string | null;
  from_image: string;
  from_version: number;
  to_image: string;
  to_version: number;
  /** From 1. */
  wave: number;
  waves: number;
  hosts_started: number;
  hosts_done: number;
  hosts: number;
  failed: number;
  max_failed: number;
  deadline_seconds: number;
  since: string;
  changed: string;
}
export type FleetCatalog = Schemas["FleetCatalog"] & { rollout?: FleetRollout | null };

export const HOST_TONE: Record<FleetHost["state"], Tone> = {
  alive: "good",
  silent: "warning",
  isolated: "warning",
  lost: "critical",
  absent: "plain",
};

/** How a host takes part in its fleet, in a sentence, and how bad that is. */
export function standing({ membership, host, name }: FleetDetails): { tone: Tone; text: string } {
  switch (membership) {
    case "member":
      return { tone: "good", text: `${host} is a member of the fleet ${name}, and has a lease.` };
    case "connecting":
      return { tone: "warning", text: `${host} has not reached etcd yet. What is on the host goes on.` };
    case "no-fleet":
      return {
        tone: "warning",
        text: `There is no fleet ${name} yet. ${host} waits until somebody makes it.`,
      };
    case "joining":
      return { tone: "note", text: `${host} is about to get a lease.` };
    case "isolated":
      return {
        tone: "critical",
        text: `${host} is isolated: it has no connection to etcd, or has lost its lease. What is on the host goes on, and nothing of the fleet changes.`,
      };
    case "refused":
      return { tone: "critical", text: `${host} is refused: it may not take part in the fleet ${name}.` };
  }
}

/** Who places machines, in words. */
export function placerText({ placer, places, membership }: FleetDetails): string {
  if (membership === "no-fleet") return "-";
  if (!places) return "switched off: another program writes the shares";
  return placer ?? "none: a host is elected within seconds while etcd has a leader";
}

/** Where what only the host that places knows can be asked for, if that is another host. */
export function placerPath(fleet: FleetDetails | undefined, path: string): string | null {
  const { placer, host } = fleet ?? {};
  return placer && placer !== host ? `/v1/fleet/hosts/${placer}/api${path}` : null;
}

export interface Totals {
  wanted: number;
  ready: number;
  claimed: number;
  failed: number;
  /** Hosts that are to have machines. */
  hosts: number;
}

/** What there is in shares, all together. */
export function totals(shares: FleetShare[]): Totals {
  const sum = { wanted: 0, ready: 0, claimed: 0, failed: 0, hosts: 0 };
  for (const { wanted, ready, claimed, failed } of shares) {
    sum.wanted += wanted;
    // What a host has beyond its share it gives up, or has lost: it is no machine that there is to be.
    sum.ready += Math.min(ready, wanted);
    sum.claimed += claimed;
    sum.failed += failed;
    if (wanted > 0) sum.hosts++;
  }
  return sum;
}

/** The name of a catalog's image, without a version. */
export function imageOf({ spec }: FleetCatalog): string {
  return spec.image.split(":")[0] ?? spec.image;
}

/** Whether the machines of a catalog keep data, which stays on the host that they are on. */
export function keepsData({ spec }: FleetCatalog): boolean {
  const keeps = spec.type === "dedicated" || spec.reset === "never" || spec.mode === "persistent";
  return keeps || spec.data_disk_bytes != null;
}

/** Whether something of a rollout can still be done: it is under way, or stands still. */
export function isOpen(rollout: FleetRollout | null | undefined): rollout is FleetRollout {
  return Boolean(rollout) && !["done", "aborted"].includes(rollout?.state ?? "");
}

const ROLLOUT_TONE: Record<string, Tone> = {
  prefetch: "note",
  running: "note",
  paused: "warning",
  halted: "critical",
  aborted: "warning",
  done: "good",
};

export function rolloutTone({ state }: FleetRollout): Tone {
  return ROLLOUT_TONE[state] ?? "note";
}

/** How far a rollout is, in a few words. */
export function rolloutText({ state, wave, waves, hosts_done, hosts, to_version }: FleetRollout): string {
  const to = `to version ${to_version}`;
  if (state === "done") return `${to}, done`;
  if (state === "prefetch") return `${to}, hosts bring it`;
  return `${to}, ${state}, wave ${wave} of ${waves}, ${hosts_done} of ${hosts} hosts`;
}

/** Settings that only catalogs of fleets have, as titles and texts. */
export function fleetSettings({ spec }: FleetCatalog): [string, string][] {
  const labels = Object.entries(spec.host_labels ?? {}).map(([key, value]) => `${key}=${value}`);
  return [
    ["Machines on all hosts", String(spec.count ?? 0)],
    ["Spread", spec.spread === "pack" ? "as few hosts as possible" : "even"],
    ["Zones", spec.zones?.join(", ") || "all"],
    ["Labels that a host needs", labels.join(", ") || "none"],
    ["Identity", spec.identity === "named" ? "machines keep their names wherever they run" : "of the host"],
    ["Lost after", `${spec.lost_after_seconds ?? 45} s without a sign of life`],
    ["Ready during a rollout", `at least ${spec.min_ready ?? 0}`],
    ["Waves", spec.waves?.join(", ") || "1, 10%, 50%, 100%"],
  ];
}
