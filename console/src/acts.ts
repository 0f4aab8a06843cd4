// Acts on machines and catalogs, each with its consequences in words and the equal command.
//
// Invariant: whatever is lost is named before it is lost.
import { api, type Catalog, type Machine, newKey, type Schemas } from "./api/client.ts";
import { changeCommand, line, parseTtl } from "./commands.ts";
import { navigate } from "./router.ts";
import { type Act, ask } from "./ui/dialog.tsx";
import { plural } from "./ui/format.ts";

type Action = Schemas["Action"];

/** Whether machines of a catalog keep what they wrote when they stop. */
export function keepsData(spec: Schemas["CatalogSpec"] | undefined): boolean {
  return spec?.type === "dedicated" || spec?.reset === "never" || spec?.mode === "persistent";
}

export interface Target {
  /** Machines by name, or all of a catalog. */
  names?: string[];
  catalog?: string;
  /** How many machines that is. */
  size: number;
  claimed: number;
  isKeeping: boolean;
  graceSeconds?: number | undefined;
}

export function machinesTarget(
  names: string[],
  rows: { name: string; claimed: boolean }[],
  catalog?: Catalog,
): Target {
  const chosen = new Set(names);
  return {
    names,
    size: names.length,
    claimed: rows.filter((r) => chosen.has(r.name) && r.claimed).length,
    isKeeping: keepsData(catalog?.spec),
    graceSeconds: catalog?.spec.grace_seconds,
  };
}

function consequences(action: Action, target: Target): string[] {
  const grace = target.graceSeconds ?? null;
  const asked =
    grace === null
      ? "Each guest is asked to shut down, and is ended after the grace period of its catalog."
      : `Each guest is asked to shut down, and is ended after ${grace} s.`;
  const lost = target.isKeeping
    ? "What the machines wrote is kept."
    : "What the machines wrote since they were started is gone.";
  const used = target.claimed
    ? [`${plural(target.claimed, "machine is", "machines are")} claimed: somebody may be using them.`]
    : [];
  switch (action) {
    case "start":
      return ["The machines are started. Machines that do not fit the budget of the host wait."];
    case "stop":
      return [asked, lost, ...used];
    case "restart":
      return [asked, lost, "They start again with the version that their catalog has now.", ...used];
    case "reset":
      return [
        target.isKeeping
          ? "Everything that the machines wrote is gone, also what they keep over restarts."
          : "What the machines wrote since they were started is gone.",
        "The guests end at once, without being asked to shut down.",
        "Machines that ran start again. Stopped ones stay off.",
        ...used,
      ];
    case "drain":
      return [
        "Each machine stops as soon as it is not claimed, and is not started or claimed again until it is undrained.",
        target.isKeeping
          ? "What the machines wrote is kept."
          : "What the machines wrote is gone when they stop.",
      ];
    case "undrain":
      return ["The machines can be started and claimed again."];
  }
}

const VERB: Record<Action, string> = {
  start: "Start",
  stop: "Stop",
  restart: "Restart",
  reset: "Reset",
  drain: "Drain",
  undrain: "Undrain",
};

/** An act on machines. */
export function machineAct(action: Action, target: Target): Act & { command: string } {
  const who =
    target.catalog !== undefined
      ? `all ${plural(target.size, "machine")} of ${target.catalog}`
      : target.size === 1
        ? (target.names?.[0] ?? "the machine")
        : plural(target.size, "machine");
  const isLosing = action === "reset" && target.isKeeping;
  const key = newKey();
  const select = target.catalog !== undefined ? { catalog: target.catalog } : { names: target.names ?? [] };
  return {
    title: `${VERB[action]} ${who}?`,
    consequences: consequences(action, target),
    verb: VERB[action],
    isDestructive: action === "reset" || action === "stop" || action === "restart",
    ...(isLosing ? { typed: target.catalog ?? target.names?.[0] ?? "" } : {}),
    command: line(
      "spillway",
      "machine",
      action,
      ...(target.catalog !== undefined ? ["--catalog", target.catalog] : (target.names ?? [])),
      isLosing && "--discard-data",
    ),
    run: () =>
      api.post("/v1/machine-actions", {
        key,
        body: { action, select, ...(isLosing ? { discard_data: true } : {}) },
      }),
    done: `${VERB[action]}: asked for ${who}.`,
  };
}

export function deleteMachine(machine: Machine, catalog: Catalog | undefined): Act {
  const isKeeping = keepsData(catalog?.spec) || catalog?.spec.data_disk_bytes != null;
  return {
    title: `Delete ${machine.name}?`,
    consequences: [
      "The machine and its identity are gone. A later machine of this name has another MAC address and UUID.",
      `The number of machines of ${machine.catalog} falls by one.`,
      isKeeping
        ? "The files of its data stay on the host as leftovers, until they are deleted there."
        : "It keeps no data.",
    ],
    verb: "Delete",
    isDestructive: true,
    ...(isKeeping ? { typed: machine.name } : {}),
    command: line("spillway", "machine", "delete", machine.name),
    run: () => api.delete("/v1/machines/{name}", { path: { name: machine.name } }),
    done: `${machine.name} is deleted.`,
    after: () => navigate(["catalogs", machine.catalog]),
  };
}

export function releaseClaim(machine: Machine): Act {
  return {
    title: `Release ${machine.name}?`,
    consequences: [
      `The claim of ${machine.claim?.owner ?? "its owner"} ends: somebody may be using the machine.`,
      "The machine is reset: what was written is gone. Then it can be claimed again.",
    ],
    verb: "Release",
    isDestructive: true,
    command: line("spillway", "machine", "release", machine.name),
    run: () =>
      api.delete("/v1/machines/{name}/claim", {
        path: { name: machine.name },
        query: { claim: machine.claim?.id },
      }),
    done: `${machine.name} is released.`,
  };
}

export function claimMachine(catalog: Catalog): Act {
  const key = newKey();
  return {
    title: `Claim a machine of ${catalog.name}`,
    consequences: [
      "A machine that is ready belongs to the owner until the claim ends. When it is released, it is reset.",
      "If the catalog keeps machines warm, another one is started in its place.",
    ],
    verb: "Claim",
    fields: [
      { key: "owner", label: "Owner", placeholder: "you", hint: "Who gets the machine." },
      {
        key: "ttl",
        label: "For",
        placeholder: "the default of the catalog",
        hint: "Such as 30m, 8h or 7d; none: until it is released.",
        check: (value) =>
          parseTtl(value) === null ? "A time is a number with s, m, h or d, or none." : null,
      },
      {
        key: "any",
        label: "If none is ready",
        options: [
          ["no", "refuse"],
          ["yes", "take another, or start one"],
        ],
      },
    ],
    command: (v) =>
      line(
        "spillway",
        "machine",
        "claim",
        catalog.name,
        ...(v.owner ? ["--owner", v.owner] : []),
        ...(v.ttl ? ["--ttl", v.ttl] : []),
        v.any === "yes" && "--wait",
      ),
    run: async (v) => {
      const ttl = v.ttl ? parseTtl(v.ttl) : null;
      const answer = await api.post("/v1/catalogs/{name}/claims", {
        path: { name: catalog.name },
        key,
        body: {
          ...(v.owner ? { owner: v.owner } : {}),
          ...(ttl === null ? {} : { ttl_seconds: ttl }),
          ...(v.any === "yes" ? { any: true } : {}),
        },
      });
      return answer.body;
    },
    done: (machine) => `${(machine as Machine).name} is claimed.`,
    after: (machine) => navigate(["machines", (machine as Machine).name]),
  };
}

export function deleteCatalog(catalog: Catalog, running: number): Act {
  const isKeeping = keepsData(catalog.spec) || catalog.spec.data_disk_bytes != null;
  return {
    title: `Delete the catalog ${catalog.name}?`,
    consequences: [
      `The catalog and its ${plural(catalog.spec.count ?? 0, "machine")} are gone, with their identities.`,
      isKeeping
        ? "The files of kept data stay on the host as leftovers, until they are deleted there."
        : "What the machines wrote is gone. They keep no data.",
      ...(running
        ? [
            `${plural(running, "machine that runs is", "machines that run are")} ended${isKeeping ? ", after the grace period" : " at once"}.`,
          ]
        : []),
      "The daemon refuses this while a machine is claimed.",
    ],
    verb: "Delete",
    isDestructive: true,
    typed: catalog.name,
    command: line("spillway", "catalog", "delete", catalog.name),
    run: () => api.delete("/v1/catalogs/{name}", { path: { name: catalog.name }, ifMatch: tag(catalog) }),
    done: `The catalog ${catalog.name} is deleted.`,
    after: () => navigate(["catalogs"]),
  };
}

/** The tag of a catalog as a header has it. */
export function tag(catalog: Catalog): string {
  return `"${catalog.revision ?? 0}"`;
}

type Spec = Schemas["CatalogSpec"];

/** A spec as a request may have it: without what a response adds. */
export function requestSpec(spec: Spec, changes: Partial<Spec> = {}): Spec {
  const { redacted: _, ...rest } = spec;
  return { ...rest, ...changes };
}

/** Replaces settings of a catalog, if nobody else has changed it since it was read. */
export function putCatalog(catalog: Catalog, changes: Partial<Spec>, isDryRun = false) {
  return api.put("/v1/catalogs/{name}", {
    path: { name: catalog.name },
    query: isDryRun ? { dry_run: true } : {},
    ifMatch: tag(catalog),
    body: requestSpec(catalog.spec, changes),
  });
}

/** Changes settings, with sentences about what that does. */
export function changeAct(
  catalog: Catalog,
  changes: Partial<Spec>,
  title: string,
  lines: Act["consequences"],
): Act {
  // Fewer machines: those with the highest numbers are deleted.
  const fewer = changes.count !== undefined && changes.count < (catalog.spec.count ?? 0);
  const gone = fewer ? (catalog.spec.count ?? 0) - (changes.count ?? 0) : 0;
  const isKeeping = keepsData(catalog.spec) || catalog.spec.data_disk_bytes != null;
  const deleted = [
    `${plural(gone, "machine is", "machines are")} deleted, with ${gone === 1 ? "its identity: the one" : "their identities: those"} with the highest ${gone === 1 ? "number" : "numbers"}. Those that run are ended.`,
    isKeeping
      ? "The files of the data that they kept stay on the host as leftovers."
      : "What they wrote is gone.",
  ];
  return {
    title,
    consequences: fewer ? [...deleted, ...lines] : lines,
    ...(fewer ? { isDestructive: true, typed: catalog.name } : {}),
    verb: "Apply",
    command: changeCommand(catalog.name, changes),
    run: () => putCatalog(catalog, changes),
    done: `${catalog.name} is changed.`,
  };
}

export { ask };
