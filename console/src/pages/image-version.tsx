// The version of an image that is looked at: what it is, what can be done with it, and what the check says of it.
import type { ComponentChildren } from "preact";
import type { Catalog, ImageCheck } from "../api/client.ts";
import { useObject } from "../state/resource.ts";
import { figures } from "../state/figures.ts";
import {
  deleteVersion,
  publishVersion,
  ref,
  removeTag,
  type Tagged,
  tagVersion,
  verifyVersion,
} from "../image-acts.ts";
import { changeResidency, pushImage } from "../image-pulls.ts";
import {
  askedText,
  type Cached,
  copyReason,
  deleteReason,
  isWritable,
  originText,
  type Registry,
  residencyText,
  stateReason,
  tagsOf,
  type Uses,
  type Version,
} from "../image-words.ts";
import { bytes, clock, count, percent, plural } from "../ui/format.ts";
import { Findings } from "../ui/findings.tsx";
import { type Offer, Offers } from "../ui/offers.tsx";
import { Facts, Notice, Panel, Pending } from "../ui/parts.tsx";

interface Props {
  tagged: Tagged;
  version: Version;
  uses: Uses | undefined;
  catalogs: Catalog[];
  registries: Registry[];
  isOffered: boolean;
}

/** The version beside what can be done with it, and with its image (`children`). */
export function VersionPanel({ children, ...props }: Props & { children: ComponentChildren }) {
  const { tagged, version, isOffered } = props;
  const cached = tagged.details.cached?.find((c) => c.version === version.version);
  const asked = askedText(version, cached);
  return (
    <div class="grid">
      <div class="column main">
        <Panel title={ref(version)} aside={residencyText(version, cached)}>
          {version.notes?.map((n) => (
            <Notice key={n}>{n}</Notice>
          ))}
          {cached ? <Streamed cached={cached} /> : null}
          {asked ? <p class="hint">{asked}</p> : null}
          <Facts
            items={[
              ["Created", clock(version.created)],
              ["From", originText(version.origin)],
              ["Store", version.store],
              ["Stored", bytes(version.stored_bytes)],
              ["Disk", bytes(version.size_bytes)],
              ["Digest", <code key="digest">{version.digest ?? "not known yet"}</code>],
            ]}
          />
        </Panel>
        <CheckPanel version={version} />
      </div>
      <div class="column">
        {isOffered ? (
          <Panel title={`What can be done with ${ref(version)}`}>
            <Offers label={`Actions on ${ref(version)}`} offers={offersOf(props)} />
          </Panel>
        ) : null}
        {children}
      </div>
    </div>
  );
}

function Streamed({ cached: c }: { cached: Cached }) {
  return (
    <div class="streamed">
      <progress
        aria-label="Chunks that are here"
        max={Math.max(1, c.chunks)}
        value={Math.min(c.present_chunks, c.chunks)}
      />
      <p>
        {count(c.present_chunks)} of {count(c.chunks)} chunks (
        {percent(c.present_chunks / Math.max(1, c.chunks), 0)}) are here, {bytes(c.present_bytes)} in the
        cache.{" "}
        {c.is_whole
          ? "The registry is not needed as long as its residency stays full."
          : c.unfilled_chunks
            ? `${count(c.unfilled_chunks)} more come in the background.`
            : "Others come when a disk reads them."}
      </p>
      {c.boot_sets?.map((set) => (
        <p key={set.catalog} class="hint">
          Machines of {set.catalog} read {plural(set.chunks, "chunk")} ({bytes(set.bytes)}) before they are
          ready
          {set.boots
            ? ` (counted in ${plural(set.boots, "start")} on this host).`
            : " (according to the registry)."}
        </p>
      ))}
    </div>
  );
}

const RESIDENCY: ["lazy" | "boot" | "full", string, string][] = [
  ["full", "Fetch all", "All of its chunks come in the background, and stay: residency full."],
  ["boot", "Stream the start first", "What machines read until they are ready comes before: residency boot."],
  ["lazy", "Stream on demand", "Chunks come when a disk reads them: residency lazy."],
];

/** The acts on a version, each possible or with its reason. */
export function offersOf({ tagged, version, uses, catalogs, registries }: Props): Offer[] {
  const { image } = tagged.details;
  const isPublished = image.published === version.version;
  const state = stateReason(version);
  const copy = state ?? copyReason(version);
  const running = () =>
    new Map((figures.value?.catalogs ?? []).map((c): [string, number] => [c.name, c.machines.running ?? 0]));
  return [
    {
      verb: "Publish",
      about: "Catalogs that follow the image take it. The dialog says which.",
      reason: state ?? (isPublished ? "It is published." : null),
      act: () => publishVersion(tagged, version, catalogs, running()),
    },
    {
      verb: "Tag",
      about: "A name for the version, such as last-good.",
      reason: state,
      act: () => tagVersion(tagged, version),
    },
    ...tagsOf(image, version.version).map(
      (tag): Offer => ({
        verb: `Remove the tag ${tag}`,
        about: "The version stays.",
        reason: null,
        act: () => removeTag(tagged, version, tag),
      }),
    ),
    {
      verb: "Push",
      about: "To a registry, for other hosts.",
      reason:
        copy ??
        (registries.some(isWritable)
          ? null
          : "This host knows no registry that can be written: add one on the page of stores and registries."),
      act: () => pushImage(version, registries),
    },
    ...residencyOffers(version, state),
    {
      verb: "Verify",
      about: "Reads all of it, and compares it with its digests.",
      reason:
        state ??
        (version.residency
          ? "It is streamed: each chunk is compared with its digest when it is read."
          : null),
      act: () => verifyVersion(version),
    },
    {
      verb: "Delete",
      about: "The content is gone.",
      reason: deleteReason(tagged.details, version, uses),
      isDestructive: true,
      act: () => deleteVersion(tagged, version),
    },
  ];
}

function residencyOffers(version: Version, state: string | null): Offer[] {
  const { origin, residency } = version;
  if (!residency || origin.kind !== "registry")
    return [
      {
        verb: "Stream",
        about: "",
        reason: "It is copied, and stays so. To stream it, pull it from a registry under another name.",
      },
    ];
  return RESIDENCY.filter(([to]) => to !== residency).map(([to, verb, about]) => ({
    verb,
    about,
    reason: state,
    act: () => changeResidency(version, origin, to),
  }));
}

function CheckPanel({ version }: { version: Version }) {
  const reason = stateReason(version) ?? copyReason(version);
  const path = `/v1/images/${encodeURIComponent(version.image)}/versions/${version.version}/check`;
  const check = useObject<ImageCheck>(reason === null ? path : null, 3_600_000);
  return (
    <Panel title={`Check of ${ref(version)}`} aside="what breaks machines that are cloned from it">
      {reason !== null ? (
        <Notice>{reason}</Notice>
      ) : check.data ? (
        <>
          <Findings check={check.data} />
          <Facts items={[["Firmware finds", bootText(check.data.boot)]]} />
          {check.data.volumes
            .filter((v) => v.unread)
            .map((v) => (
              <p key={v.offset_bytes} class="hint">
                {v.partition ? `Partition ${v.partition}` : "The disk"} ({v.content}, {bytes(v.size_bytes)})
                was not looked into: {v.unread}
              </p>
            ))}
        </>
      ) : (
        <Pending error={check.error} what="the check, which takes some seconds" />
      )}
    </Panel>
  );
}

/** What firmware finds on a disk to start from, in the words of `spillway image check`. */
export function bootText(boot: ImageCheck["boot"]): string {
  const table = { none: "no partition table", mbr: "an MBR", gpt: "a GPT" }[boot.partition_table];
  return [
    table,
    boot.bios_code ? "code for a BIOS" : "no code for a BIOS",
    ...(boot.efi_partition == null ? [] : [`an EFI system partition (${boot.efi_partition})`]),
    boot.efi_programs.length ? boot.efi_programs.join(", ") : "no program for UEFI",
  ].join(", ");
}
