// What a machine has while it is off, or has no disk yet.
//
// Invariant: of a disk that is not served, no figure is shown. What is not known is said to be.
import { keepsData } from "../acts.ts";
import type { CatalogSpec, Machine, Schemas } from "../api/client.ts";
import { bytes } from "../ui/format.ts";
import { Notice } from "../ui/parts.tsx";

const NO_DISK: Record<Schemas["Phase"], string> = {
  stopped: "The machine is off, and has no disk now.",
  waiting: "The machine waits to be started, and has no disk yet.",
  placing: "A private copy of the image is being made, and the machine has no disk yet.",
  starting: "The machine starts, and has no disk yet.",
  running: "The disk of the machine is not served now.",
  stopping: "The machine stops, and its disk is not served any more.",
  failed: "The machine has failed, and has no disk now.",
};

/** What a machine without a running guest holds, a sentence each. Empty: its disk is served and its guest is not off. */
export function heldWords(status: Machine["status"], spec: CatalogSpec | undefined): string[] {
  const { phase, run } = status;
  if (run) {
    return phase === "stopped"
      ? [
          "The machine is off, and its disk keeps what was written until a reset.",
          "While it is off, most of that is in the overflow, so that the RAM is free for others.",
        ]
      : [];
  }
  const isFile = spec?.type === "dedicated" || spec?.mode === "persistent";
  const lines = [
    isFile && phase === "stopped" ? "The machine is off, and its disk is not served." : NO_DISK[phase],
  ];
  if (!spec) return lines;
  if (isFile) {
    lines.push(
      "What it has written is kept in a file on the host, and is there again after the next start. How much that is can be seen while the machine runs.",
    );
  } else if (keepsData(spec)) {
    lines.push("The machine has no data: it has not run since its last reset, or since the host booted.");
  } else if (phase === "stopped") {
    lines.push("What it wrote was discarded when it stopped. Each start begins with the image.");
  }
  if (spec.data_disk_bytes)
    lines.push(`Its data disk of ${bytes(spec.data_disk_bytes)} keeps what was written to it.`);
  return lines;
}

export function HeldNotice({ machine, spec }: { machine: Machine; spec: CatalogSpec | undefined }) {
  const lines = heldWords(machine.status, spec);
  return lines.length ? <Notice>{lines.join(" ")}</Notice> : null;
}
