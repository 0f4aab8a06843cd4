// Fields of a catalog's settings, for the wizard and for changes. Descriptions (hints.json), bounds and when a change takes
// effect (spec-fields.json) come from the API's description, so that they are the daemon's.
//
// Invariant: an empty field is an absent setting. The form has no defaults of its own.
import type { Signal } from "@preact/signals";
import { useEffect, useId, useRef, useState } from "preact/hooks";
import about from "../api/spec-fields.json";
import { type Draft, isSame, type Key, type Wrong } from "../state/edits.ts";
import { networkText } from "../commands.ts";
import { parseSize, sizeText } from "./format.ts";
import { hintOf } from "./hints.ts";
import { Prose } from "./parts.tsx";

type Kind =
  | "size"
  | "number"
  | "text"
  | "area"
  | "lines"
  | "labels"
  | "flag"
  | "network"
  | "networks"
  | "store"
  | readonly string[];
/** When a change of a setting takes effect, as the daemon says it. */
export type Effect = "at once" | "at the next start" | "cannot be changed";

export interface FieldInfo {
  key: Key;
  title: string;
  kind: Kind;
  /** Folded away in the wizard. */
  isAdvanced?: boolean;
  /** What may be typed, where it is no plain text. */
  form?: string;
  /** What the words of a choice mean, where they do not say it. */
  means?: Record<string, string>;
}

const MODES = ["ram+overflow", "ram", "overflow", "direct", "ephemeral", "persistent"] as const;

/** All settings, in the groups that the wizard shows. */
export const GROUPS: Record<"machines" | "cache" | "identity", FieldInfo[]> = {
  machines: [
    { key: "count", title: "Machines", kind: "number" },
    { key: "naming", title: "Names", kind: "text" },
    { key: "vcpus", title: "Virtual processors", kind: "number" },
    { key: "memory_bytes", title: "Memory", kind: "size" },
    {
      key: "network",
      title: "Network",
      kind: "network",
      form: "user, none or bridge=NAME",
    },
    { key: "warm", title: "Kept warm", kind: "number" },
    {
      key: "ready",
      title: "Ready when",
      kind: "text",
      form: "agent, phone-home, tcp:PORT, serial:REGEX",
    },
    {
      key: "display",
      title: "Screen",
      kind: ["none", "vnc"],
      isAdvanced: true,
    },
    { key: "vmm", title: "VMM", kind: ["host", "external"], isAdvanced: true },
    { key: "socket_group", title: "Group of sockets", kind: "text", isAdvanced: true },
    { key: "video", title: "Graphics card", kind: ["vga", "virtio"], isAdvanced: true },
    { key: "guest", title: "Guest", kind: ["linux", "windows"], isAdvanced: true },
    { key: "firmware", title: "Firmware", kind: ["bios", "uefi", "uefi-secure"], isAdvanced: true },
    { key: "tpm", title: "TPM", kind: ["none", "2.0"], isAdvanced: true },
    { key: "sockets", title: "Sockets", kind: "number", isAdvanced: true },
    { key: "cpu_model", title: "Processor model", kind: "text", isAdvanced: true },
    { key: "machine_type", title: "Machine type", kind: "text", isAdvanced: true },
    { key: "hugepages", title: "Huge pages", kind: "flag", isAdvanced: true },
    {
      key: "more_networks",
      title: "More networks",
      kind: "networks",
      form: "bridge=NAME, bridge=NAME",
      isAdvanced: true,
    },
    { key: "watchdog", title: "Watchdog", kind: ["reset", "poweroff", "pause"], isAdvanced: true },
    {
      key: "type",
      title: "Type",
      kind: ["pooled", "dedicated"],
      isAdvanced: true,
    },
    {
      key: "reset",
      title: "Reset by",
      kind: ["power-cycle", "guest-reboot", "never"],
      isAdvanced: true,
    },
    { key: "autostart", title: "Start with the daemon", kind: "flag", isAdvanced: true },
    { key: "start_order", title: "Start order", kind: "number", isAdvanced: true },
    { key: "start_delay_seconds", title: "Start delay, s", kind: "number", isAdvanced: true },
    {
      key: "grace_seconds",
      title: "Time to shut down, s",
      kind: "number",
      isAdvanced: true,
    },
    {
      key: "claim_ttl_seconds",
      title: "Duration of claims, s",
      kind: "number",
      isAdvanced: true,
    },
    {
      key: "data_disk_bytes",
      title: "Data disk",
      kind: "size",
      isAdvanced: true,
    },
    {
      key: "data_disk_store",
      title: "Store of data disks",
      kind: "store",
      isAdvanced: true,
    },
    {
      key: "scratch_disk_bytes",
      title: "Scratch disk",
      kind: "size",
      isAdvanced: true,
    },
    {
      key: "scratch_format",
      title: "Scratch format",
      kind: "text",
      isAdvanced: true,
      form: "ntfs:LABEL, ext4:LABEL",
    },
    { key: "kernel", title: "Kernel", kind: "text", isAdvanced: true },
    { key: "initrd", title: "Initial RAM disk", kind: "text", isAdvanced: true },
    {
      key: "append",
      title: "Kernel command line",
      kind: "text",
      isAdvanced: true,
    },
    { key: "extra_args", title: "Arguments for QEMU", kind: "lines", isAdvanced: true },
    {
      key: "labels",
      title: "Labels",
      kind: "labels",
      isAdvanced: true,
      form: "KEY=VALUE, KEY=VALUE",
    },
  ],
  cache: [
    { key: "ram_bytes", title: "RAM tier", kind: "size" },
    { key: "overflow_bytes", title: "Overflow", kind: "size" },
    { key: "mode", title: "Mode", kind: MODES },
    { key: "full", title: "When the cache is full", kind: ["pause", "fail"] },
    {
      key: "ram_guarantee_bytes",
      title: "Guaranteed RAM",
      kind: "size",
      isAdvanced: true,
    },
    {
      key: "overflow_store",
      title: "Store of overflow files",
      kind: "store",
      isAdvanced: true,
    },
    { key: "warn_at", title: "Warning at, %", kind: "number", isAdvanced: true },
    {
      key: "critical_at",
      title: "Critical at, %",
      kind: "number",
      isAdvanced: true,
    },
    { key: "iops", title: "Requests a second", kind: "number", isAdvanced: true },
    { key: "iops_burst", title: "Burst of requests", kind: "number", isAdvanced: true },
    { key: "bandwidth_bytes", title: "Bytes a second", kind: "size", isAdvanced: true },
    {
      key: "bandwidth_burst_bytes",
      title: "Burst of bytes",
      kind: "size",
      isAdvanced: true,
    },
    {
      key: "base_cache",
      title: "Cache for the base image",
      kind: ["host", "none"],
      means: { host: "the host's page cache", none: "read past it" },
      isAdvanced: true,
    },
    {
      key: "verify_reads",
      title: "Verify the image",
      kind: "flag",
      isAdvanced: true,
    },
    {
      key: "residency",
      title: "Residency of streamed images",
      kind: ["lazy", "boot", "full"],
      isAdvanced: true,
    },
  ],
  identity: [
    { key: "authorized_keys", title: "SSH keys", kind: "lines" },
    { key: "user_data", title: "User data for cloud-init", kind: "area" },
  ],
};

export const FIELDS: FieldInfo[] = [...GROUPS.machines, ...GROUPS.cache, ...GROUPS.identity];

type About = { effect: Effect; minimum?: number; maximum?: number; multipleOf?: number };
const ABOUT = about as Record<string, Partial<About>>;

export function aboutOf(key: Key): About {
  // A test compares the fields with the API's settings.
  return { effect: "at the next start", ...ABOUT[key] };
}

/** Why a number is not allowed, in words; null if it is. */
export function boundError(key: Key, value: number): string | null {
  const { minimum, maximum, multipleOf } = aboutOf(key);
  const isSize = key.endsWith("_bytes");
  const text = (n: number) => (isSize ? sizeText(n) : String(n));
  if (minimum !== undefined && value < minimum) return `The least is ${text(minimum)}.`;
  if (maximum !== undefined && value > maximum) return `The most is ${text(maximum)}.`;
  if (multipleOf !== undefined && value % multipleOf !== 0)
    return `It must be a multiple of ${text(multipleOf)}.`;
  return null;
}

/** Text of a value as its field shows it. */
export function shown(field: FieldInfo, value: unknown): string {
  if (value === undefined || value === null) return "";
  if (field.kind === "size") return sizeText(Number(value));
  if (field.kind === "flag") return value ? "yes" : "no";
  if (field.kind === "lines") return (value as string[]).join("\n");
  if (field.kind === "labels") {
    return Object.entries(value as Record<string, string>)
      .map(([k, v]) => `${k}=${v}`)
      .join(", ");
  }
  if (field.kind === "network") return networkText(value);
  if (field.kind === "networks") return (value as unknown[]).map(networkText).join(", ");
  return String(value);
}

function parseNetwork(word: string): unknown {
  const bridge = word.match(/^bridge=(.+)$/)?.[1];
  return bridge ? { bridge } : word === "user" || word === "none" ? word : null;
}

/** Reads what was typed: undefined if nothing was, or an error in words. */
export function read(field: FieldInfo, text: string): { value: unknown } | { error: string } {
  const trimmed = text.trim();
  if (trimmed === "") return { value: undefined };
  switch (field.kind) {
    case "size": {
      const n = parseSize(trimmed);
      if (typeof n !== "number") return n;
      const error = boundError(field.key, n);
      return error ? { error } : { value: n };
    }
    case "number": {
      if (!/^\d+$/.test(trimmed)) return { error: "It is a whole number." };
      const error = boundError(field.key, Number(trimmed));
      return error ? { error } : { value: Number(trimmed) };
    }
    case "lines":
      return {
        value: text
          .split("\n")
          .map((l) => l.trim())
          .filter((l) => l && !l.startsWith("#")),
      };
    case "labels": {
      const pairs = trimmed.split(/[\s,]+/).map((p) => p.split("="));
      if (pairs.some((p) => p.length < 2 || !p[0]))
        return { error: "A label is KEY=VALUE; several are separated by commas." };
      return { value: Object.fromEntries(pairs.map(([k, ...v]) => [k, v.join("=")])) };
    }
    case "network":
    case "networks": {
      const all = trimmed.split(/[\s,]+/).map(parseNetwork);
      if (all.includes(null) || (field.kind === "network" && all.length > 1))
        return { error: "A network is user, none or bridge=NAME." };
      return { value: field.kind === "network" ? all[0] : all };
    }
    case "area":
      return { value: text };
    default:
      return { value: trimmed };
  }
}

/** What has to be corrected, in words; null if nothing has. */
export function wrongText(wrong: Wrong): string | null {
  const titles = FIELDS.filter((field) => wrong[field.key] !== undefined).map((field) => field.title);
  return titles.length ? `Correct first: ${titles.join(", ")}.` : null;
}

export function SpecField({
  field,
  draft,
  change,
  wrong,
  stores = [],
}: {
  field: FieldInfo;
  draft: Draft;
  change(key: Key, value: unknown): void;
  /** Fields whose text is no value, with their text. Nothing is done before they are corrected. */
  wrong: Signal<Wrong>;
  stores?: string[];
}) {
  const id = useId();
  const value = draft[field.key];
  const [typed, setTyped] = useState<string | null>(wrong.value[field.key] ?? null);
  const text = typed ?? shown(field, value);
  const parsed = typed === null ? null : read(field, typed);
  const error = parsed && "error" in parsed ? parsed.error : null;
  const description = hintOf(field.key);
  // What somebody else has set, such as a suggestion, replaces what was typed.
  const last = useRef(value);
  useEffect(() => {
    const isOther = !isSame(last.current, value);
    last.current = value;
    if (!isOther || typed === null) return;
    const result = read(field, typed);
    if ("value" in result && isSame(result.value, value)) return;
    setTyped(null);
    const { [field.key]: _, ...others } = wrong.value;
    wrong.value = others;
  }, [value]);
  const take = (next: string) => {
    setTyped(next);
    const result = read(field, next);
    const { [field.key]: _, ...others } = wrong.value;
    wrong.value = "error" in result ? { ...others, [field.key]: next } : others;
    if ("value" in result) change(field.key, result.value);
  };
  const common = {
    id,
    "aria-describedby": `${id}-about`,
    "aria-invalid": error ? true : undefined,
  };
  const offered = Array.isArray(field.kind)
    ? (field.kind as readonly string[])
    : field.kind === "store"
      ? stores
      : null;
  // A store may be gone, or not be read yet.
  const options = offered && text !== "" && !offered.includes(text) ? [...offered, text] : offered;
  return (
    <div class={`field${field.kind === "area" || field.kind === "lines" ? " long" : ""}`}>
      <label for={id}>{field.title}</label>
      {field.kind === "flag" ? (
        <select
          {...common}
          value={value === undefined ? "" : String(value)}
          onChange={(e) =>
            change(field.key, e.currentTarget.value === "" ? undefined : e.currentTarget.value === "true")
          }
        >
          <option value="">not set</option>
          <option value="true">yes</option>
          <option value="false">no</option>
        </select>
      ) : options ? (
        <select
          {...common}
          value={text}
          onChange={(e) => change(field.key, e.currentTarget.value || undefined)}
        >
          <option value="">not set</option>
          {options.map((o) => (
            <option key={o} value={o}>
              {field.means?.[o] ? `${o}: ${field.means[o]}` : o}
            </option>
          ))}
        </select>
      ) : field.kind === "area" || field.kind === "lines" ? (
        <textarea
          {...common}
          rows={field.kind === "area" ? 8 : 4}
          spellcheck={false}
          value={text}
          onInput={(e) => take(e.currentTarget.value)}
        />
      ) : (
        <input
          {...common}
          type="text"
          inputMode={field.kind === "number" ? "numeric" : "text"}
          autocomplete="off"
          spellcheck={false}
          placeholder={field.form ?? "not set"}
          value={text}
          onInput={(e) => take(e.currentTarget.value)}
          onBlur={() => !error && setTyped(null)}
        />
      )}
      <p class={error ? "hint critical-text" : "hint"} id={`${id}-about`}>
        {error ?? <Prose text={description} />}
      </p>
    </div>
  );
}
