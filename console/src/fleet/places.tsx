// What the frame around every page has more in a fleet: the choice of the host that is shown, and the places of the fleet.
//
// Invariant: a host is chosen by its address alone, so that a page that is loaded again shows the same.
import { Badge, href, route, shownHost, useList } from "../shared.ts";
import { useFleet } from "./read.ts";
import type { FleetDetails, FleetHost } from "./words.ts";

/** Beyond this many hosts, they are not read for a choice: the page of the fleet has them all. */
const MOST_HOSTS = 100;
const HOSTS_MS = 30_000;
/** Pages of one object, which another host may not have. */
const LISTS = ["catalogs", "machines", "images", "stores", "operations", "events", "reports", "about"];

function HostChoice({ fleet }: { fleet: FleetDetails }) {
  const number = Object.values(fleet.hosts).reduce((sum, hosts) => sum + hosts, 0);
  const hosts = useList<FleetHost>(number <= MOST_HOSTS ? "/v1/fleet/hosts" : null, HOSTS_MS);
  const names = new Set([...(hosts.data ?? []).map((h) => h.name), ...(shownHost ? [shownHost] : [])]);
  names.delete(fleet.host);
  const page = LISTS.filter((name) => name === route.value.parts[0]);
  return (
    <label class="choice" style={{ padding: "12px" }}>
      <span>Host</span>
      <select
        value={shownHost === fleet.host ? "" : (shownHost ?? "")}
        onChange={(e) => {
          location.hash = href(page, {}, e.currentTarget.value || null);
        }}
      >
        <option value="">{fleet.host} (this one)</option>
        {[...names].sort().map((name) => (
          <option key={name} value={name}>
            {name}
          </option>
        ))}
      </select>
    </label>
  );
}

export function FleetPlaces() {
  const { data: fleet } = useFleet();
  const place = route.value.parts[0];
  const isWrong = fleet && (fleet.membership !== "member" || fleet.brake || fleet.etcd.trouble);
  return (
    <>
      <a href={href(["fleet"])} aria-current={place === "fleet" ? "page" : undefined}>
        Fleet {isWrong ? <Badge tone="warning">warning</Badge> : null}
      </a>
      <a href={href(["fleet-catalogs"])} aria-current={place === "fleet-catalogs" ? "page" : undefined}>
        Fleet catalogs
      </a>
      {fleet ? <HostChoice fleet={fleet} /> : null}
    </>
  );
}
