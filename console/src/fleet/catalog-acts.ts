// Acts on catalogs of the fleet, each with what it means and the equal command.
//
// Invariant: a change of settings is based on the revision that was read.
import type { Schemas } from "../api/client.ts";
import { line } from "../commands.ts";
import { api, navigate, raw } from "../shared.ts";
import type { Act, Values } from "../ui/dialog.tsx";
import { parseWhole, plural } from "../ui/format.ts";
import { type FleetCatalog, type FleetRollout, imageOf, isOpen, keepsData, totals } from "./words.ts";

const command = (...words: (string | undefined)[]) => line("spillway", "fleet", "catalog", ...words);
const MOST_MACHINES = 100_000;
const MOST_VERSION = 4_294_967_295;

const wrong = (least: number, most: number) => (text: string) => {
  const parsed = parseWhole(text, least, most);
  return typeof parsed === "object" ? parsed.error : null;
};

function tag({ revision }: FleetCatalog): string {
  return `"${revision}"`;
}

/** Why its settings cannot be sent back, in words; null if they can. */
export function redactedReason({ spec }: FleetCatalog): string | null {
  const hidden = spec.redacted ?? [];
  return hidden.length ? `Your role may not read ${hidden.join(" and ")}.` : null;
}

export function scale(catalog: FleetCatalog): Act {
  const { name, spec } = catalog;
  return {
    title: `Scale ${name}`,
    consequences: [
      `It has ${plural(spec.count ?? 0, "machine")} on all hosts together, of which ${totals(catalog.shares).claimed} are claimed.`,
      "With more machines, hosts get further ones where there is space.",
      "With fewer, those of draining hosts go first, then those of hosts with most. Unclaimed ones go before claimed ones, which stay until they are released.",
      keepsData(catalog)
        ? "What removed machines kept stays on their hosts as leftovers."
        : "What removed machines wrote is gone.",
    ],
    verb: "Scale",
    fields: [
      {
        key: "count",
        label: "Machines on all hosts",
        isRequired: true,
        placeholder: String(spec.count ?? 0),
        check: wrong(0, MOST_MACHINES),
      },
    ],
    command: (v) => command("scale", name, v.count || "COUNT"),
    run: (v) => {
      const { redacted: _, ...rest } = spec;
      return api.put("/v1/fleet/catalogs/{name}", {
        path: { name },
        ifMatch: tag(catalog),
        body: { ...rest, count: Number(v.count) } as Schemas["FleetCatalogSpec"],
      });
    },
    done: `${name} is scaled.`,
  };
}

/** How running machines get a version, as the API has it; undefined: as before. */
function strategyOf(v: Values): Schemas["RolloutStrategy"] | undefined {
  if (v.how === "batch") return { batch: Number(v.batch || "1") };
  return v.how === "now" || v.how === "next-start" ? v.how : undefined;
}

function strategyText(strategy: Schemas["RolloutStrategy"]): string {
  return typeof strategy === "object" ? `batch=${strategy.batch}` : strategy;
}

/** Moves a catalog to another version. `here`: the versions that the host that is asked has, newest first. */
export function update(catalog: FleetCatalog, here: number[]): Act {
  const { name, strategy, spec } = catalog;
  const image = imageOf(catalog);
  return {
    title: `Update ${name}`,
    consequences: [
      `It has ${image}:${catalog.version} now. Each host needs the version, with the same number and content.`,
      `Hosts get it in waves (${spec.waves?.join(", ") || "1, 10%, 50%, 100%"}), and each restarts its own machines.`,
      keepsData(catalog)
        ? "Disks that keep their data stay at their version."
        : "What restarted machines wrote is gone.",
      ...(isOpen(catalog.rollout)
        ? ["A rollout is under way: hosts that it has reached get this version, too."]
        : []),
    ],
    verb: "Update",
    fields: [
      {
        key: "version",
        label: `Version of ${image}`,
        isRequired: true,
        placeholder: String(here[0] ?? catalog.version + 1),
        hint: here.length ? `This host has ${here.join(", ")}.` : "This host has none of them.",
        check: wrong(1, MOST_VERSION),
      },
      {
        key: "how",
        label: "When machines of a host take it",
        options: [
          ["", `as before (${strategyText(strategy)})`],
          ["batch", "some at a time are restarted"],
          ["now", "all of the host are restarted at once"],
          ["next-start", "at their next start"],
        ],
      },
      {
        key: "batch",
        label: "Restarted at the same time, on each host",
        placeholder: "1",
        hint: "Only if some at a time are restarted.",
        check: wrong(1, MOST_MACHINES),
      },
    ],
    command: (v) => {
      const how = strategyOf(v);
      return command(
        "update",
        name,
        "--image",
        `${image}:${v.version || "VERSION"}`,
        ...(how ? ["--rollout", strategyText(how)] : []),
      );
    },
    run: (v) => {
      const how = strategyOf(v);
      return api.post("/v1/fleet/catalogs/{name}/update", {
        path: { name },
        ifMatch: tag(catalog),
        body: { version: Number(v.version), ...(how ? { strategy: how } : {}) },
      });
    },
    done: `${name} gets another version.`,
  };
}

/** Moves a catalog back to a version that it had. `null`: to the one before, or to the one that a rollout began with. */
export function rollBack(catalog: FleetCatalog, to: number | null): Act {
  const { name, rollout, history } = catalog;
  const before = isOpen(rollout) ? rollout.from_version : history.at(-2)?.version;
  const version = to ?? before;
  return {
    title: `Roll ${name} back${version === undefined ? "" : ` to version ${version}`}?`,
    consequences: [
      "Hosts that have another version get it at once, without waves. The others are not touched.",
      "Each host restarts its machines as the catalog's strategy says.",
      keepsData(catalog)
        ? "Disks that keep their data stay at their version."
        : "What restarted machines wrote is gone.",
    ],
    verb: "Roll back",
    isDestructive: true,
    command: command("rollback", name, ...(to === null ? [] : ["--to", String(to)])),
    run: () =>
      api.post("/v1/fleet/catalogs/{name}/rollback", { path: { name }, body: to === null ? {} : { to } }),
    done: `${name} goes back.`,
  };
}

const ROLLOUT = {
  pause: {
    verb: "Pause",
    lines: ["No further machine is restarted, on no host. Those that were restarted go on starting."],
    done: "paused",
  },
  resume: {
    verb: "Resume",
    lines: [
      "Hosts bring the version if they do not have it, and the wave goes on.",
      "Machines that have failed by now are not counted any more: the rollout halts at further ones.",
    ],
    done: "resumed",
  },
  abort: {
    verb: "Abort",
    lines: [
      "Hosts keep the version that they have now: the catalog has two versions, until it gets another one.",
      "It cannot be resumed.",
    ],
    done: "ended",
  },
} as const;
export type RolloutAction = keyof typeof ROLLOUT;

export function changeRollout(catalog: FleetCatalog, rollout: FleetRollout, action: RolloutAction): Act {
  const { verb, lines, done } = ROLLOUT[action];
  const { name } = catalog;
  return {
    title: `${verb} the rollout of ${name}?`,
    consequences: [
      `${rollout.hosts_done} of ${plural(rollout.hosts, "host")} have ${rollout.to_image}:${rollout.to_version}.`,
      ...lines,
    ],
    verb,
    isDestructive: action !== "pause",
    command: command("rollout", action, name),
    run: () => raw("POST", `/v1/fleet/catalogs/${name}/rollout`, { body: { action } }),
    done: `The rollout of ${name} is ${done}.`,
  };
}

export function deleteCatalog(catalog: FleetCatalog): Act {
  const { name } = catalog;
  const { claimed } = totals(catalog.shares);
  return {
    title: `Delete the catalog ${name} of the fleet?`,
    consequences: [
      `Each host gives up its machines: ${plural(catalog.spec.count ?? 0, "machine")} in all.`,
      claimed
        ? `${plural(claimed, "machine is", "machines are")} claimed, and stay until they are released.`
        : "Claimed machines stay until they are released.",
      keepsData(catalog)
        ? "What machines kept stays on their hosts as leftovers."
        : "What the machines wrote is gone.",
    ],
    verb: "Delete",
    isDestructive: true,
    typed: name,
    command: command("delete", name),
    run: () => api.delete("/v1/fleet/catalogs/{name}", { path: { name } }),
    done: `The catalog ${name} of the fleet is deleted.`,
    after: () => navigate(["fleet-catalogs"]),
  };
}
