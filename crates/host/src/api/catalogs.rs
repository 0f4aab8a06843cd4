//! Routes of catalogs.

use super::conditions::{IfMatch, Tagged};
use super::extract::{Body, DryRun, IdempotencyKey, PageQuery, Path, Query, part, select};
use super::{ApiState, ProblemResponse, ask, ask_for};
use crate::access::caller::{Caller, Role};
use crate::access::note::RequestNote;
use crate::catalogs::CatalogChangeTerms;
use crate::error::HostError;
use crate::paging::PageBuilder;
use crate::store::Revision;
use axum::extract::State;
use axum::{Extension, Json};
use serde::Deserialize;
use spillway_api::{
    Catalog, CatalogRollback, CatalogSpec, CatalogUpdate, Difference, Empty, EventKind, Name, NewCatalog,
    Page, RolloutAction, RolloutChange, differences,
};
use utoipa::IntoParams;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

type JsonResult<T> = Result<Json<T>, HostError>;
type TaggedCatalog = Result<Tagged<Catalog>, HostError>;

pub fn routes() -> OpenApiRouter<ApiState> {
    OpenApiRouter::new()
        .routes(routes!(list_catalogs, create_catalog))
        .routes(routes!(get_catalog, replace_catalog, delete_catalog))
        .routes(routes!(update_catalog))
        .routes(routes!(change_catalog_rollout))
        .routes(routes!(roll_back_catalog))
}

/// Which of them.
#[derive(IntoParams)]
#[into_params(parameter_in = Query)]
#[expect(dead_code, reason = "for the document")]
struct CatalogQuery {
    /// Those with this label, `KEY=VALUE`; again for more, all of which must be there.
    #[param(required = false)]
    label: Vec<String>,
}

/// All catalogs, or those with certain labels.
#[utoipa::path(get, path = "", params(CatalogQuery, PageQuery), responses((status = 200, body = Page<Catalog>), ProblemResponse))]
async fn list_catalogs(
    State(app): State<ApiState>,
    Extension(caller): Extension<Caller>,
    Query(mut pairs): Query<Vec<(String, String)>>,
) -> JsonResult<Page<Catalog>> {
    let part = part(&mut pairs)?;
    let selector = select(pairs, &["label"])?;
    ask(move || {
        let mut page = PageBuilder::new(&part);
        for catalog in app.catalogs.list_after(&part.after) {
            let catalog = catalog?;
            let is_chosen = selector.chooses(&catalog);
            let name = catalog.name.clone();
            let seen = |catalog| seen_by(caller.role, app.machines.rollouts.with_progress(catalog));
            if is_chosen && !page.add(name.as_str(), seen(catalog)) {
                break;
            }
        }
        Ok(page.page())
    })
    .await
}

/// What is passed on to guests may hold secrets: it is for those who may do something with them.
fn seen_by(role: Role, mut catalog: Catalog) -> Catalog {
    if role == Role::Read {
        catalog.spec.redact();
    }
    catalog
}

/// Tells the audit log what has become another.
fn note_change(note: &RequestNote, before: &Catalog, after: &Catalog) {
    let mut changed = differences(&after.name, &before.spec, &after.spec);
    if before.version != after.version {
        let (now, then) = (before.version.into(), after.version.into());
        changed.push(Difference { setting: "version".into(), now, then, live: false });
    }
    note.changed(changed);
}

/// A catalog with its tag, which is its revision.
fn tagged(catalog: Catalog) -> Tagged<Catalog> {
    Tagged(Revision(catalog.revision), catalog)
}

/// A new catalog. Its machines are recorded when this is answered.
#[utoipa::path(post, path = "", params(DryRun, IdempotencyKey), request_body = NewCatalog, responses((status = 200, body = Catalog, headers(("ETag" = String, description = "Tag of the object, for `If-Match` of a later request."))), ProblemResponse))]
async fn create_catalog(
    State(app): State<ApiState>,
    Extension(caller): Extension<Caller>,
    note: RequestNote,
    key: IdempotencyKey,
    Query(DryRun { dry_run }): Query<DryRun>,
    Body(new): Body<NewCatalog>,
) -> TaggedCatalog {
    let key = key.of(&caller.name, "catalogs", &new);
    let made = ask_for(move || {
        note.name(new.name.as_str());
        if dry_run {
            return app.catalogs.create(&new.name, &new.spec, true);
        }
        let create = || app.catalogs.create(&new.name, &new.spec, false).map(|catalog| catalog.name);
        let (name, is_repeated) = app.idempotency.once(key.as_ref(), create)?;
        match is_repeated {
            true => note.repeated(),
            false => note.made(&new.spec),
        }
        app.catalogs.get(&name)
    });
    made.await.map(tagged)
}

/// A catalog.
#[utoipa::path(get, path = "/{name}", params(("name" = Name, Path)), responses((status = 200, body = Catalog, headers(("ETag" = String, description = "Tag of the object, for `If-Match` of a later request."))), ProblemResponse))]
async fn get_catalog(
    State(app): State<ApiState>,
    Extension(caller): Extension<Caller>,
    Path(name): Path<Name>,
) -> TaggedCatalog {
    let seen =
        move || Ok(seen_by(caller.role, app.machines.rollouts.with_progress(app.catalogs.get(&name)?)));
    ask_for(seen).await.map(tagged)
}

/// On which terms.
#[derive(Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct ChangeTerms {
    /// What machines keep may be thrown away.
    #[serde(default)]
    discard_data: bool,
    /// What machines keep that are removed goes too; else their files stay in their store.
    #[serde(default)]
    with_data: bool,
    /// Remove machines though somebody has claimed them.
    #[serde(default)]
    force: bool,
    /// With `true` the request is checked in full and nothing is changed; the answer is what the change would make.
    #[serde(default)]
    dry_run: bool,
}

/// Other settings of a catalog, all of them: what is left out has its usual value.
#[utoipa::path(put, path = "/{name}", params(("name" = Name, Path), IfMatch, ChangeTerms), request_body = CatalogSpec, responses((status = 200, body = Catalog, headers(("ETag" = String, description = "Tag of the object, for `If-Match` of a later request."))), ProblemResponse))]
async fn replace_catalog(
    State(app): State<ApiState>,
    Path(name): Path<Name>,
    IfMatch(expected): IfMatch,
    note: RequestNote,
    Query(terms): Query<ChangeTerms>,
    Body(spec): Body<CatalogSpec>,
) -> TaggedCatalog {
    let ChangeTerms { discard_data, with_data, force, dry_run } = terms;
    let terms = CatalogChangeTerms { expected, discard_data, with_data, force, dry_run };
    let changed = ask_for(move || {
        let (catalog, before) = app.catalogs.change(&name, &spec, terms)?;
        if !dry_run {
            note_change(&note, &before, &catalog);
        }
        Ok(catalog)
    });
    changed.await.map(tagged)
}

/// What goes with a catalog.
#[derive(Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct DeleteTerms {
    /// What the machines keep goes too; else their files stay in their store.
    #[serde(default)]
    with_data: bool,
    /// Also if somebody has claimed one of its machines.
    #[serde(default)]
    force: bool,
}

/// Removes a catalog and its machines. Those that run are ended: with their grace if they keep something that stays, else at once.
#[utoipa::path(delete, path = "/{name}", params(("name" = Name, Path), IfMatch, DeleteTerms), responses((status = 200, body = Empty), ProblemResponse))]
async fn delete_catalog(
    State(app): State<ApiState>,
    Path(name): Path<Name>,
    IfMatch(expected): IfMatch,
    Query(DeleteTerms { with_data, force }): Query<DeleteTerms>,
) -> JsonResult<Empty> {
    let terms = CatalogChangeTerms { expected, with_data, force, ..CatalogChangeTerms::default() };
    ask(move || app.catalogs.delete(&name, terms).map(|()| Empty {})).await
}

/// Another version for a catalog's machines, or another way that they come to it. A rollout that goes on is replaced.
#[utoipa::path(post, path = "/{name}/update", params(("name" = Name, Path), IfMatch, DryRun), request_body = CatalogUpdate, responses((status = 200, body = Catalog, headers(("ETag" = String, description = "Tag of the object, for `If-Match` of a later request."))), ProblemResponse))]
async fn update_catalog(
    State(app): State<ApiState>,
    Path(name): Path<Name>,
    IfMatch(expected): IfMatch,
    note: RequestNote,
    Query(DryRun { dry_run }): Query<DryRun>,
    Body(update): Body<CatalogUpdate>,
) -> TaggedCatalog {
    let terms = CatalogChangeTerms { expected, dry_run, ..CatalogChangeTerms::default() };
    let updated = ask_for(move || {
        let (catalog, before) = app.catalogs.update(&name, &update, terms)?;
        if !dry_run {
            note_change(&note, &before, &catalog);
        }
        Ok(catalog)
    });
    updated.await.map(tagged)
}

/// Pauses a catalog's rollout, lets it go on, or ends it. Machines that have the version keep it in any case. `conflict`:
/// no rollout goes on.
#[utoipa::path(post, path = "/{name}/rollout", params(("name" = Name, Path), IfMatch), request_body = RolloutChange, responses((status = 200, body = Catalog, headers(("ETag" = String, description = "Tag of the object, for `If-Match` of a later request."))), ProblemResponse))]
async fn change_catalog_rollout(
    State(app): State<ApiState>,
    Extension(caller): Extension<Caller>,
    Path(name): Path<Name>,
    IfMatch(expected): IfMatch,
    note: RequestNote,
    Body(RolloutChange { action }): Body<RolloutChange>,
) -> TaggedCatalog {
    note.verb(match action {
        RolloutAction::Pause => "pause rollout",
        RolloutAction::Resume => "resume rollout",
        RolloutAction::Abort => "abort rollout",
    });
    let changed = ask_for(move || {
        let (catalog, is_changed) = app.catalogs.change_rollout(&name, action, expected)?;
        let what = match action {
            RolloutAction::Pause => "is paused",
            RolloutAction::Resume => "goes on",
            RolloutAction::Abort => {
                "is aborted: machines that have the version keep it, the others take it at their next start"
            }
        };
        if is_changed {
            let text = format!("its rollout {what} (by {caller})");
            app.events.raise(EventKind::Rollout, &format!("catalog/{name}"), text);
        }
        Ok(app.machines.rollouts.with_progress(catalog))
    });
    changed.await.map(tagged)
}

/// A version of a catalog's history. It stays with that one until the next update.
#[utoipa::path(post, path = "/{name}/rollback", params(("name" = Name, Path), IfMatch, DryRun), request_body = CatalogRollback, responses((status = 200, body = Catalog, headers(("ETag" = String, description = "Tag of the object, for `If-Match` of a later request."))), ProblemResponse))]
async fn roll_back_catalog(
    State(app): State<ApiState>,
    Path(name): Path<Name>,
    IfMatch(expected): IfMatch,
    note: RequestNote,
    Query(DryRun { dry_run }): Query<DryRun>,
    Body(rollback): Body<CatalogRollback>,
) -> TaggedCatalog {
    let terms = CatalogChangeTerms { expected, dry_run, ..CatalogChangeTerms::default() };
    let moved = ask_for(move || {
        let (catalog, before) = app.catalogs.rollback(&name, &rollback, terms)?;
        if !dry_run {
            note_change(&note, &before, &catalog);
        }
        Ok(catalog)
    });
    moved.await.map(tagged)
}
