// The entry of the fleet's pages: chooses one by the route.
import { route } from "../shared.ts";
import { FleetCatalogPage } from "./catalog.tsx";
import { FleetCatalogsPage } from "./catalogs.tsx";
import { FleetPage as Overview } from "./fleet.tsx";
import { FleetHostPage } from "./host.tsx";

export { FleetPlaces } from "./places.tsx";

export function FleetPage() {
  const [page, name] = route.value.parts;
  if (page === "fleet") return name ? <FleetHostPage key={name} name={name} /> : <Overview />;
  return name ? <FleetCatalogPage key={name} name={name} /> : <FleetCatalogsPage />;
}
