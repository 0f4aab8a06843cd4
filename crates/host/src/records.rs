//! All kinds of stored records. Owns the list; each kind is defined where it is used.
//!
//! Invariant: the version of the records changes whenever a stored type does.

use crate::store::RecordKind;
use crate::{backup, catalogs, fleet, idempotency, images, machines, registries, stores, streaming};

/// Returns all kinds.
pub fn kinds() -> Vec<RecordKind> {
    let all = catalogs::RECORDS.into_iter().chain(images::RECORDS).chain(machines::RECORDS);
    all.chain(registries::RECORDS)
        .chain(stores::RECORDS)
        .chain(streaming::RECORDS)
        .chain(idempotency::RECORDS)
        .chain(backup::RECORDS)
        .chain(fleet::RECORDS)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::machines::run_schema;
    use crate::store::RECORDS_VERSION;
    use serde_json::{Map, Value, json};
    use sha2::{Digest, Sha256};

    /// What the stored types of each version look like: the version moves with every change to one of them.
    const DIGESTS: [(u32, &str); 10] = [
        (2, "4985c5293b2c53287bb6944638d3955c7b26bf4ada8f85188de572d38fc4462d"),
        (3, "c531c8a8e3a3976164b9057d61d9521ad24fbc344987ec52b4aa3cb7aa73736f"),
        (4, "9a4f720f282c0fb65c668151cfce8b34baeb3704a6886b2791b073ea57677faa"),
        (5, "fafdabe2ec72f60148408aa5feecdefb65fbf7f2eaf4c03038459153e3e74e8b"),
        (6, "4ae7b68b0d9d026d72909143f284204f150b77ef5f5997f706e45e117b39199f"),
        (7, "cfdd26bfb56189ca87b4f2bd0166bdc00d05959697cdacffa516ae3621e81d67"),
        (8, "569d68d3cc23a20de3e9cf0e38263ba0495efa5c2f694f5026ce26b07a542854"),
        (9, "02b93df65f3522c3a1679c2204bc2f3ef177659fcefa7c8106166631bdd4f700"),
        (10, "43a2fb65453116dc120bb3eb8fe3f06f9706ef81d1ec0bd513e318f494c82176"),
        (11, "837c56a318ea8d8d2c0f1756f1436a4ce92ead34eca84419bc6e39320ff54217"),
    ];

    /// What is for people and clients, and changes nothing that is stored.
    fn is_for_people(key: &str) -> bool {
        ["description", "title", "example", "examples"].contains(&key) || key.starts_with("x-")
    }

    /// The same without words for people, the fields in the order of their names.
    fn plain(value: &Value, is_list_of_fields: bool) -> Value {
        match value {
            Value::Object(fields) => {
                let mut kept: Vec<_> = fields.iter().collect();
                kept.retain(|(key, _)| is_list_of_fields || !is_for_people(key));
                kept.sort_by_key(|(key, _)| key.to_owned());
                let plain = |(key, value): (&String, &Value)| {
                    (key.clone(), plain(value, key == "properties" && !is_list_of_fields))
                };
                Value::Object(kept.into_iter().map(plain).collect::<Map<_, _>>())
            }
            Value::Array(items) => items.iter().map(|item| plain(item, false)).collect(),
            other => other.clone(),
        }
    }

    fn schemas() -> Value {
        let mut all = Map::new();
        let run = ("run.json", run_schema());
        for (prefix, (own, named)) in kinds().iter().map(|kind| (kind.prefix, (kind.schema)())).chain([run]) {
            let mut named: Vec<_> = named.into_iter().map(|(name, schema)| json!([name, schema])).collect();
            named.sort_by_key(|pair| pair.to_string());
            named.dedup();
            all.insert(prefix.into(), json!({ "own": own, "named": named }));
        }
        plain(&Value::Object(all), false)
    }

    #[test]
    fn the_version_moves_with_every_field() {
        let schemas = schemas();
        let found: String =
            Sha256::digest(schemas.to_string()).iter().map(|byte| format!("{byte:02x}")).collect();
        let (version, digest) = DIGESTS[DIGESTS.len() - 1];
        assert!(
            (version, digest) == (RECORDS_VERSION, found.as_str()),
            "a type that is stored is not what it was in version {RECORDS_VERSION} of the records: raise RECORDS_VERSION \
             (crates/host/src/store/mod.rs) by one, and add it here with the digest {found}"
        );
    }

    #[test]
    fn a_field_more_is_another_digest_and_other_words_are_not() {
        let all = schemas();
        let machine = |schema: &Value| schema["machines/"].to_string();
        assert!(
            machine(&all).contains("\"number\"") && machine(&all).contains("\"uuid\""),
            "{}",
            machine(&all)
        );
        let words = json!({ "type": "object", "description": "It.", "properties": { "description": { "type": "string" } } });
        let other = json!({ "properties": { "description": { "type": "string" } }, "type": "object", "description": "That." });
        assert_eq!(plain(&words, false).to_string(), plain(&other, false).to_string());
        let less = json!({ "properties": {}, "type": "object", "description": "That." });
        assert_ne!(plain(&words, false).to_string(), plain(&less, false).to_string());
        let mut kinds: Vec<_> = kinds().iter().map(|kind| kind.prefix).collect();
        kinds.sort();
        let count = kinds.len();
        kinds.dedup();
        assert_eq!(kinds.len(), count, "no two kinds have one prefix");
    }
}
