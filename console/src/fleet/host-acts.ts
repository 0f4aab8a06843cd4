// Acts on hosts of the fleet and on the fleet itself, each with what it means and the equal command.
//
// Invariant: an act that would be refused is not offered; what is lost is named before.
import { line } from "../commands.ts";
import { api, navigate } from "../shared.ts";
import type { Act } from "../ui/dialog.tsx";
import { plural } from "../ui/format.ts";
import { type FleetDetails, type FleetHost, totals } from "./words.ts";

type Action = "cordon" | "uncordon" | "drain" | "declare-dead";

const command = (action: string, host: string) => line("spillway", "fleet", "host", action, host);
const post = (action: Action, host: string) =>
  api.post("/v1/fleet/hosts/{host}", { path: { host }, body: { action } });

const KEPT =
  "Machines that keep data are never replaced: dedicated ones, reset = never, and those with a data disk. Their data is on this host alone.";

export function cordon({ name }: FleetHost): Act {
  return {
    title: `Cordon ${name}?`,
    consequences: ["The host gets no further machines. Those that it has stay.", "Uncordon ends it."],
    verb: "Cordon",
    command: command("cordon", name),
    run: () => post("cordon", name),
    done: `${name} gets no further machines.`,
  };
}

export function uncordon({ name, draining }: FleetHost): Act {
  return {
    title: `Uncordon ${name}?`,
    consequences: [
      "The host gets machines again, of catalogs that find it the best place.",
      ...(draining ? ["The drain ends. What was replaced elsewhere stays there."] : []),
    ],
    verb: "Uncordon",
    command: command("uncordon", name),
    run: () => post("uncordon", name),
    done: `${name} gets machines again.`,
  };
}

export function drain({ name, shares }: FleetHost): Act {
  const { wanted, claimed } = totals(shares);
  return {
    title: `Drain ${name}?`,
    consequences: [
      `${plural(wanted, "machine is", "machines are")} replaced on other hosts, as far as these have space. ${name} gives up its own as those get ready, and gets no further ones.`,
      "What its machines wrote is gone with them.",
      claimed
        ? `${plural(claimed, "machine is", "machines are")} claimed, and stay until they are released.`
        : "Claimed machines stay until they are released.",
      KEPT,
      "Uncordon ends it.",
    ],
    verb: "Drain",
    isDestructive: wanted > 0,
    command: command("drain", name),
    run: () => post("drain", name),
    done: `${name} is draining.`,
  };
}

/** Why a host cannot be declared dead or removed, in words; null if it can. */
export function livingReason({ name, state, address }: FleetHost): string | null {
  if (state !== "alive" && !address) return null;
  return `${name} renews its lease: it is alive.`;
}

export function declareDead({ name, shares }: FleetHost): Act {
  return {
    title: `Declare ${name} dead?`,
    consequences: [
      `Say this only if you know that ${name} is off. Nobody checks it, and nothing is waited for.`,
      `${plural(totals(shares).wanted, "machine is", "machines are")} replaced on other hosts at once, as far as these have space.`,
      "If its machines do run, there are more than were asked for until the host comes back.",
      "When it comes back, it counts as alive again, and gives up machines that others have in their place: claimed ones when they are released.",
      KEPT,
    ],
    verb: "Declare dead",
    isDestructive: true,
    typed: name,
    command: command("declare-dead", name),
    run: () => post("declare-dead", name),
    done: `${name} counts as lost. Its machines are replaced.`,
  };
}

export function removeHost({ name, shares }: FleetHost): Act {
  return {
    title: `Remove ${name} from the fleet?`,
    consequences: [
      `Its records and shares are gone, and other hosts get machines in place of its ${plural(totals(shares).wanted, "machine")}.`,
      "Of catalogs that keep data, the new machines begin empty. The data stays on the host that is removed.",
      `What is on ${name} itself stays as it is.`,
    ],
    verb: "Remove",
    isDestructive: true,
    typed: name,
    command: command("remove", name),
    run: () => api.delete("/v1/fleet/hosts/{host}", { path: { host: name } }),
    done: `${name} is removed from the fleet.`,
    after: () => navigate(["fleet"]),
  };
}

/** Makes the fleet that the host was started for. */
export function makeFleet({ name }: FleetDetails): Act {
  return {
    title: `Make the fleet ${name}?`,
    consequences: [
      "Its records are written to etcd. Hosts that wait for it join.",
      "No machine is changed: catalogs that hosts have stay their own.",
    ],
    verb: "Make it",
    command: line("spillway", "fleet", "init"),
    run: () => api.post("/v1/fleet", { body: {} as never }),
    done: `The fleet ${name} is made.`,
  };
}

/** Switches the placer on or off. */
export function switchPlacer({ places }: FleetDetails): Act {
  const way = places ? "off" : "on";
  return {
    title: `Switch the placer ${way}?`,
    consequences: places
      ? [
          "Nothing is placed or replaced any more, also not the machines of a host that is lost. Rollouts over hosts stand still.",
          "Another program may write the shares meanwhile.",
          "Hosts keep the machines that they have.",
        ]
      : [
          "One of the hosts decides again which host has how many machines. What has changed meanwhile is placed at once.",
          "A program that writes the shares must stop first.",
        ],
    verb: places ? "Switch off" : "Switch on",
    isDestructive: places,
    command: line("spillway", "fleet", "placer", way),
    run: () => api.put("/v1/fleet/placer", { body: { enabled: !places } }),
    done: `The placer is switched ${way}.`,
  };
}
