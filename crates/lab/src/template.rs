//! Fills the templates of reports and pictures.
//!
//! Owns the settings of the template engine. Invariants: every value is escaped unless its template marks it as `safe`; a value that a
//! template names and its caller has not given is an error.

use anyhow::{Context, Result};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::Serde;
use minijinja::{AutoEscape, Environment, UndefinedBehavior};
use serde::Serialize;

/// Fills a template with values. `name` is for error messages.
pub(crate) fn render(name: &str, template: &str, values: &impl Serialize) -> Result<String> {
    let mut environment = Environment::new();
    environment.set_auto_escape_callback(|_| AutoEscape::Html);
    environment.set_undefined_behavior(UndefinedBehavior::Strict);
    // A line that has tags only leaves nothing behind.
    let mut syntax = SyntaxConfig::builder();
    syntax.trim_blocks(true).lstrip_blocks(true).keep_trailing_newline(true);
    environment.set_syntax(syntax.build().context("the syntax of templates is the usual one")?);
    environment
        .render_named_str(name, template, Serde(values))
        .with_context(|| format!("template {name}: cannot be filled"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_escaped_in_elements_and_in_attributes() {
        let hostile = [("name", "</p><script>alert('1')</script>\" onload=\"x & y")];
        let values = std::collections::BTreeMap::from(hostile);
        let html = render("test", "<p title=\"{{ name }}\">{{ name }}</p>", &values).unwrap();
        let escaped = "&lt;&#x2f;p&gt;&lt;script&gt;alert(&#x27;1&#x27;)&lt;&#x2f;script&gt;&quot; onload=&quot;x &amp; y";
        assert_eq!(html, format!("<p title=\"{escaped}\">{escaped}</p>"));
    }

    #[test]
    fn a_missing_value_is_an_error_that_names_the_template_and_the_line() {
        let values = std::collections::BTreeMap::from([("name", "x")]);
        let error = format!("{:#}", render("test", "{{ name }}\n{{ other }}", &values).unwrap_err());
        assert!(error.contains("template test") && error.contains("test:2"), "{error}");
    }
}
