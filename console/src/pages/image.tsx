// One image: its versions, who uses them, what is being done with it, and the version that is looked at.
//
// Invariant: the version that is looked at is in the URL (`version`); without one it is the published one, or the newest.
import { ApiError, type Catalog, type ImageDetails, type Schemas, type Store } from "../api/client.ts";
import { deleteImage, deleteImageReason, type Tagged } from "../image-acts.ts";
import {
  originText,
  type Registry,
  residencyText,
  tagsOf,
  type Uses,
  usesOf,
  type Version,
} from "../image-words.ts";
import { href, queryValue, route } from "../router.ts";
import { useList, useObject } from "../state/resource.ts";
import { can } from "../state/session.ts";
import { now } from "../state/visible.ts";
import { ago, bytes, clock } from "../ui/format.ts";
import { NeedsAdmin, type Offer, Offers } from "../ui/offers.tsx";
import { OperationsPanel } from "../ui/operation.tsx";
import { Badge, Notice, PageHead, Panel, Pending } from "../ui/parts.tsx";
import { type Column, Table } from "../ui/table.tsx";
import { newVersionOffers } from "./image-new.ts";
import { VersionPanel } from "./image-version.tsx";
import "../style/images.css";

export function ImagePage({ name }: { name: string }) {
  const loaded = useObject<ImageDetails>(`/v1/images/${encodeURIComponent(name)}`);
  const catalogs = useList<Catalog>("/v1/catalogs");
  const registries = useList<Registry>("/v1/registries");
  const stores = useList<Store>("/v1/stores");
  const leftovers = useList<Schemas["Leftover"]>("/v1/leftovers");
  const details = loaded.data;
  const crumbs = [{ text: "Images", to: ["images"] }];
  if (!details) {
    return (
      <>
        <PageHead title={name} crumbs={crumbs} />
        {loaded.error instanceof ApiError && loaded.error.code === "not_found" ? (
          <Notice>There is no image {name}.</Notice>
        ) : (
          <Pending error={loaded.error} what="the image" />
        )}
        <OperationsPanel image={name} />
      </>
    );
  }
  const { image, versions } = details;
  const uses = usesOf(name, catalogs.data ?? [], leftovers.data);
  const asked = Number(queryValue("version"));
  const shown =
    versions.find((v) => v.version === asked) ??
    versions.find((v) => v.version === image.published) ??
    versions.at(-1);
  const tagged = { details, etag: loaded.etag };
  // What is offered depends on who uses the image: nothing is, before that is known.
  const isKnown = [catalogs, registries, stores, leftovers].every((list) => list.data !== undefined);
  const isOffered = can("admin") && isKnown;
  return (
    <>
      <PageHead
        title={name}
        crumbs={crumbs}
        about={
          <>
            {image.published ? `Version ${image.published} is published` : "No version is published"}
            <NeedsAdmin what="Changing an image" />
          </>
        }
      />
      <Table
        label={`Versions of ${name}`}
        rows={versions}
        columns={columns(details, uses, shown)}
        id={(v) => String(v.version)}
        initial="version"
        empty="The image has no versions."
      />
      <div class="below">
        <OperationsPanel image={name} />
        {shown ? (
          <VersionPanel
            key={shown.version}
            tagged={tagged}
            version={shown}
            uses={uses.get(shown.version)}
            catalogs={catalogs.data ?? []}
            registries={registries.data ?? []}
            isOffered={isOffered}
          >
            {isOffered ? (
              <>
                <Panel title="Another version">
                  <Offers
                    label="Ways to make another version"
                    offers={newVersionOffers(
                      details,
                      catalogs.data ?? [],
                      registries.data ?? [],
                      (stores.data ?? []).map((s) => s.name),
                    )}
                  />
                </Panel>
                <Panel title="The whole image">
                  <Offers label={`Actions on the image ${name}`} offers={[imageOffer(tagged, uses)]} />
                </Panel>
              </>
            ) : null}
          </VersionPanel>
        ) : null}
      </div>
    </>
  );
}

function imageOffer(tagged: Tagged, uses: Map<number, Uses>): Offer {
  return {
    verb: "Delete the image",
    about: `All its versions are gone: ${tagged.details.versions.length}.`,
    reason: deleteImageReason(tagged.details, uses),
    isDestructive: true,
    act: () => deleteImage(tagged),
  };
}

function columns(
  details: ImageDetails,
  uses: Map<number, Uses>,
  shown: Version | undefined,
): Column<Version>[] {
  const { image } = details;
  return [
    {
      key: "version",
      title: "Version",
      sort: (v) => -v.version,
      cell: (v) => (
        <span class="counts">
          <a
            href={href(route.value.parts, { version: String(v.version) })}
            aria-current={v === shown ? "true" : undefined}
          >
            Version {v.version}
          </a>
          {image.published === v.version ? <Badge tone="good">published</Badge> : null}
          {v.state === "ready" ? null : <Badge tone="note">{v.state}</Badge>}
          {tagsOf(image, v.version).map((tag) => (
            <Badge key={tag}>{tag}</Badge>
          ))}
        </span>
      ),
    },
    {
      key: "here",
      title: "On the host",
      cell: (v) =>
        residencyText(
          v,
          details.cached?.find((c) => c.version === v.version),
        ),
    },
    {
      key: "used",
      title: "Used by",
      cell: (v) => {
        const of = uses.get(v.version);
        if (!of) return "nothing";
        return (
          <span class="counts">
            {of.next.map((c) => (
              <a key={c} href={href(["catalogs", c])}>
                {c}
              </a>
            ))}
            {of.before.length ? <span>in the history of {of.before.join(", ")}</span> : null}
            {of.left.length ? <span>what {of.left.join(", ")} left</span> : null}
          </span>
        );
      },
    },
    {
      key: "size",
      title: "Disk",
      isFigure: true,
      sort: (v) => v.size_bytes,
      cell: (v) => bytes(v.size_bytes),
    },
    {
      key: "stored",
      title: "Stored",
      isFigure: true,
      isWide: true,
      sort: (v) => v.stored_bytes,
      cell: (v) => bytes(v.stored_bytes),
    },
    {
      key: "created",
      title: "Created",
      isFigure: true,
      sort: (v) => Date.parse(v.created),
      cell: (v) => (
        <time dateTime={v.created} title={clock(v.created)}>
          {ago(v.created, now.value)}
        </time>
      ),
    },
    {
      key: "origin",
      title: "From",
      isWide: true,
      cell: (v) => <code class="clip">{originText(v.origin)}</code>,
    },
  ];
}
