//! Reports of a trace set: Markdown, and HTML in one file with plots.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;

use crate::schema::{Definition, Solution, Status, Trace};
use crate::traceset::TraceSet;

/// How a solution did on all workloads of its definition.
#[derive(Clone, Debug, PartialEq)]
pub struct Line<'a> {
    /// The solution's name.
    pub solution: &'a str,
    /// Who wrote it.
    pub author: &'a str,
    /// Workloads that passed, and all that it has traces of.
    pub passed: (usize, usize),
    /// Geometric mean of the speed-ups over the reference of those that passed.
    pub speedup: f64,
    /// Largest absolute error of those that passed.
    pub error: f64,
    /// Speed-ups, one for each workload that passed, largest first.
    pub speedups: Vec<f64>,
}

/// Solutions of a definition, those that passed everywhere first, then by speed-up; the last trace of a workload counts.
pub fn leaders<'a>(set: &'a TraceSet, definition: &Definition) -> Vec<Line<'a>> {
    let mut last: BTreeMap<(&str, &str), &Trace> = BTreeMap::new();
    for trace in set.traces_of(definition.name()) {
        if let Some(solution) = trace.solution() {
            last.insert((solution, trace.workload().uuid()), trace);
        }
    }
    let names: BTreeSet<&str> = last.keys().map(|(solution, _)| *solution).collect();
    let line = |name: &'a str| {
        let of: Vec<&Trace> = last.iter().filter(|((s, _), _)| *s == name).map(|(_, t)| *t).collect();
        let passed: Vec<_> = of.iter().filter_map(|t| t.passed()).collect();
        let mut speedups: Vec<f64> = passed.iter().map(|(_, p)| p.speedup_factor).collect();
        speedups.sort_by(|a, b| b.total_cmp(a));
        let logs: f64 = speedups.iter().map(|s| s.max(1e-9).ln()).sum();
        Line {
            solution: name,
            author: set.solution(name).map_or("?", Solution::author),
            passed: (passed.len(), of.len()),
            speedup: if passed.is_empty() { 0.0 } else { (logs / passed.len() as f64).exp() },
            error: passed.iter().map(|(c, _)| c.max_absolute_error).fold(0.0, f64::max),
            speedups,
        }
    };
    let mut lines: Vec<Line<'_>> = names.into_iter().map(line).collect();
    let whole = |l: &Line<'_>| l.passed.0 == l.passed.1;
    lines.sort_by(|a, b| {
        whole(b).cmp(&whole(a)).then(b.speedup.total_cmp(&a.speedup)).then_with(|| a.solution.cmp(b.solution))
    });
    lines
}

/// Definitions that have traces.
fn measured(set: &TraceSet) -> Vec<&Definition> {
    set.definitions().filter(|d| set.traces_of(d.name()).next().is_some()).collect()
}

fn counts(set: &TraceSet) -> Vec<(&'static str, usize)> {
    let of = |s: Status| set.traces().filter(|t| t.evaluation().is_some_and(|e| e.status() == s)).count();
    Status::ALL.into_iter().map(|s| (s.name(), of(s))).filter(|(_, n)| *n > 0).collect()
}

/// The report as Markdown.
pub fn markdown(set: &TraceSet) -> String {
    let mut out = String::from("# Benchmark\n\n");
    let total = set.traces().count();
    let _ = writeln!(
        out,
        "{} definitions, {} solutions, {total} traces.\n",
        set.definitions().count(),
        set.solutions().count()
    );
    for (name, n) in counts(set) {
        let _ = writeln!(out, "* {name}: {n}");
    }
    for definition in measured(set) {
        let _ = writeln!(out, "\n## {}\n", definition.name());
        out.push_str(
            "| solution | author | passed | speed-up (geometric mean) | largest error |\n|---|---|---|---|---|\n",
        );
        for l in leaders(set, definition) {
            let (passed, of) = l.passed;
            let _ = writeln!(
                out,
                "| {} | {} | {passed} of {of} | {:.3} | {:.2e} |",
                l.solution, l.author, l.speedup, l.error
            );
        }
    }
    out
}

/// Text in HTML.
pub fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

/// A name in an address.
fn segment(name: &str) -> String {
    let mut out = String::new();
    for b in name.bytes() {
        if b.is_ascii_alphanumeric() || b"-._~".contains(&b) {
            out.push(char::from(b));
        } else {
            let _ = write!(out, "%{b:02X}");
        }
    }
    out
}

const STYLE: &str = "body{font:15px/1.5 system-ui,sans-serif;max-width:70em;margin:2em auto;padding:0 1em;color:#222;background:#fff}\
table{border-collapse:collapse;margin:.7em 0}td,th{padding:.25em .8em;border-bottom:1px solid #ddd;text-align:left}\
td.n{text-align:right;font-variant-numeric:tabular-nums}pre{background:#f6f6f4;padding:1em;overflow:auto}a{color:#0b57d0}\
.PASSED{color:#17722f}.bad{color:#b3261e}svg text{font:11px system-ui,sans-serif;fill:#444}\
@media(prefers-color-scheme:dark){body{background:#161616;color:#ddd}pre{background:#222}td,th{border-color:#333}a{color:#8ab4f8}svg text{fill:#bbb}}";

/// A page around `body`.
pub fn page(title: &str, body: &str) -> String {
    format!(
        "<!doctype html><html lang=\"en\"><head><meta charset=\"utf-8\"><title>{0}</title>\
         <meta name=\"viewport\" content=\"width=device-width\"><style>{STYLE}</style></head><body>\n{body}\n</body></html>\n",
        escaped(title)
    )
}

const COLORS: [&str; 6] = ["#0b57d0", "#b3261e", "#17722f", "#8a5a00", "#6b3fa0", "#00717a"];

/// Share of workloads that are at least `p` times as fast as the reference, over `p`, one line for each solution.
fn speed_plot(lines: &[Line<'_>]) -> String {
    let largest = lines.iter().flat_map(|l| l.speedups.first()).copied().fold(1.0, f64::max) * 1.1;
    let (w, h) = (560.0, 180.0);
    let x = |s: f64| 40.0 + s / largest * w;
    let mut svg = format!(
        "<svg width=\"720\" height=\"{}\" role=\"img\" aria-label=\"share of workloads over speed-up\">",
        h + 50.0
    );
    for part in [0.0, 0.5, 1.0] {
        let y = 10.0 + h * (1.0 - part);
        let _ = write!(
            svg,
            "<line x1=\"40\" x2=\"{}\" y1=\"{y}\" y2=\"{y}\" stroke=\"#8883\"/><text x=\"4\" y=\"{}\">{:.0} %</text>",
            40.0 + w,
            y + 4.0,
            part * 100.0
        );
    }
    for i in 0..=4 {
        let s = largest * f64::from(i) / 4.0;
        let _ = write!(svg, "<text x=\"{}\" y=\"{}\">{s:.1}×</text>", x(s) - 8.0, h + 28.0);
    }
    for (line, color) in lines.iter().zip(COLORS.iter().cycle()) {
        let n = line.passed.1.max(1) as f64;
        let mut path = format!("M{:.1} {:.1}", x(0.0), 10.0 + h * (1.0 - line.speedups.len() as f64 / n));
        for (i, s) in line.speedups.iter().enumerate().rev() {
            let (y, below) = (10.0 + h * (1.0 - (i + 1) as f64 / n), 10.0 + h * (1.0 - i as f64 / n));
            let _ = write!(path, "L{:.1} {y:.1}L{:.1} {below:.1}", x(*s), x(*s));
        }
        let name = escaped(line.solution);
        let _ = write!(
            svg,
            "<path d=\"{path}\" fill=\"none\" stroke=\"{color}\" stroke-width=\"2\"><title>{name}</title></path>"
        );
    }
    svg.push_str("</svg><p>Share of workloads that are at least so many times as fast as the reference.</p><p>");
    for (line, color) in lines.iter().zip(COLORS.iter().cycle()) {
        let _ = write!(svg, "<span style=\"color:{color}\">■</span> {} &nbsp; ", escaped(line.solution));
    }
    svg + "</p>"
}

/// How many traces have an error of each power of ten.
fn error_plot<'a>(traces: impl Iterator<Item = &'a Trace>) -> String {
    let mut bins = [0usize; 12];
    for (c, _) in traces.filter_map(|t| t.passed()) {
        let e = c.max_absolute_error;
        let bin = if e <= 0.0 { 0.0 } else { (e.log10().floor() + 10.0).clamp(1.0, 11.0) };
        bins[bin as usize] += 1;
    }
    let most = bins.iter().max().copied().unwrap_or(0).max(1) as f64;
    let mut svg = String::from(
        "<svg width=\"720\" height=\"140\" role=\"img\" aria-label=\"traces over largest absolute error\">",
    );
    for (i, n) in bins.iter().enumerate() {
        let (x, height) = (40.0 + i as f64 * 52.0, 90.0 * *n as f64 / most);
        let label = if i == 0 { "0".to_owned() } else { format!("1e{}", i as i32 - 10) };
        let _ = write!(
            svg,
            "<rect x=\"{x}\" y=\"{:.1}\" width=\"40\" height=\"{height:.1}\" fill=\"#0b57d0\"/><text x=\"{}\" y=\"{:.1}\">{n}</text><text x=\"{}\" y=\"126\">{label}</text>",
            105.0 - height,
            x + 14.0,
            100.0 - height,
            x + 8.0
        );
    }
    svg + "</svg>"
}

fn board(lines: &[Line<'_>], link: bool) -> String {
    let mut out = String::from("<table><tr><th>solution<th>author<th>passed<th>speed-up<th>largest error</tr>");
    for l in lines {
        let name = escaped(l.solution);
        let name = if link { format!("<a href=\"#{name}\">{name}</a>") } else { name };
        let bad = if l.passed.0 < l.passed.1 { " bad" } else { "" };
        let _ = write!(
            out,
            "<tr><td>{name}<td>{}<td class=\"n{bad}\">{} of {}<td class=n>{:.3}<td class=n>{:.2e}</tr>",
            escaped(l.author),
            l.passed.0,
            l.passed.1,
            l.speedup,
            l.error
        );
    }
    out + "</table>"
}

/// The report as one HTML file.
pub fn html(set: &TraceSet) -> String {
    let mut body = String::from("<h1>Benchmark</h1><table>");
    for (name, n) in counts(set) {
        let _ = write!(body, "<tr><td class=\"{name}\">{name}<td class=n>{n}</tr>");
    }
    body.push_str("</table><h2>Largest absolute errors of what passed</h2>");
    body.push_str(&error_plot(set.traces()));
    for definition in measured(set) {
        let lines = leaders(set, definition);
        let _ = write!(body, "<h2>{}</h2>{}{}", escaped(definition.name()), board(&lines, false), speed_plot(&lines));
    }
    page("Benchmark", &body)
}

/// A viewer's first page: what there is.
pub fn index(set: &TraceSet) -> String {
    let mut body = String::from(
        "<h1>Trace set</h1><p><a href=\"/report\">report</a></p><table><tr><th>definition<th>op type<th>workloads<th>solutions<th>traces<th>best</tr>",
    );
    for d in set.definitions() {
        let lines = leaders(set, d);
        let best = lines.first().map_or(String::new(), |l| format!("{} {:.2}×", escaped(l.solution), l.speedup));
        let _ = write!(
            body,
            "<tr><td><a href=\"/definitions/{0}\">{1}</a><td>{2}<td class=n>{3}<td class=n>{4}<td class=n>{5}<td>{best}</tr>",
            segment(d.name()),
            escaped(d.name()),
            escaped(d.op_type()),
            set.workloads_of(d.name()).count(),
            set.solutions_of(d.name()).count(),
            set.traces_of(d.name()).count()
        );
    }
    page("Trace set", &(body + "</table>"))
}

/// A viewer's page of a definition: what it is, its solutions with their source, its traces.
pub fn definition_page(set: &TraceSet, d: &Definition) -> String {
    let name = escaped(d.name());
    let mut body =
        format!("<p><a href=\"/\">all</a></p><h1>{name}</h1><p>{}</p>", escaped(d.description().unwrap_or("")));
    body.push_str("<table><tr><th>tensor<th>shape<th>type</tr>");
    for (side, specs) in [("", d.inputs()), ("→ ", d.outputs())] {
        for (n, s) in specs {
            let shape = s.shape.as_ref().map_or("number".into(), |s| format!("[{}]", s.join(", ")));
            let _ = write!(body, "<tr><td>{side}{}<td>{}<td>{}</tr>", escaped(n), escaped(&shape), s.dtype);
        }
    }
    body.push_str("</table>");
    for c in d.constraints() {
        let _ = write!(body, "<p><code>{}</code></p>", escaped(&c.text));
    }
    let _ = write!(body, "<h2>Reference</h2><pre>{}</pre>", escaped(d.reference()));
    let lines = leaders(set, d);
    if !lines.is_empty() {
        let _ = write!(body, "<h2>Results</h2>{}{}", board(&lines, true), speed_plot(&lines));
        if let [a, b, ..] = lines.as_slice() {
            let (to, a, b) = ([a, b].map(|l| segment(l.solution)).join("/"), escaped(a.solution), escaped(b.solution));
            let _ = write!(body, "<p><a href=\"/compare/{to}\">{a} beside {b}</a></p>");
        }
    }
    for s in set.solutions_of(d.name()) {
        let id = escaped(s.name());
        let _ = write!(body, "<h2 id=\"{id}\">{id}</h2><p>{} by {}</p>", s.language().name(), escaped(s.author()));
        for source in s.sources() {
            let _ = write!(body, "<h3>{}</h3><pre>{}</pre>", escaped(&source.path), escaped(&source.content));
        }
    }
    body.push_str(
        "<h2>Traces</h2><table><tr><th>solution<th>workload<th>status<th>ms<th>speed-up<th>absolute<th>relative</tr>",
    );
    for t in set.traces_of(d.name()) {
        let Some(e) = t.evaluation() else { continue };
        let axes: Vec<String> = t.workload().axes().iter().map(|(n, v)| format!("{n}={v}")).collect();
        let status = e.status().name();
        let class = if e.status() == Status::Passed { status } else { "bad" };
        let _ = write!(
            body,
            "<tr><td>{}<td>{}<td class=\"{class}\" title=\"{}\">{status}",
            escaped(t.solution().unwrap_or("")),
            escaped(&axes.join(" ")),
            escaped(e.log())
        );
        let times = e.performance().map_or("<td><td>".into(), |p| {
            format!("<td class=n>{:.4}<td class=n>{:.3}", p.latency_ms, p.speedup_factor)
        });
        let errors = e.correctness().map_or("<td><td>".into(), |c| {
            format!("<td class=n>{:.2e}<td class=n>{:.2e}", c.max_absolute_error, c.max_relative_error)
        });
        body.extend([times, errors]);
    }
    body.push_str("</table>");
    page(d.name(), &body)
}

/// A viewer's page of two solutions of a definition, workload by workload.
pub fn compare_page(set: &TraceSet, a: &Solution, b: &Solution) -> String {
    let (x, y) = (escaped(a.name()), escaped(b.name()));
    let mut body = format!(
        "<p><a href=\"/definitions/{}\">{}</a></p><h1>{x} and {y}</h1><table><tr><th>workload<th>{x}, ms<th>{y}, ms<th>ratio</tr>",
        segment(a.definition()),
        escaped(a.definition())
    );
    for w in set.workloads_of(a.definition()) {
        let ms = |s: &Solution| {
            let of = set
                .traces_of(a.definition())
                .filter(|t| t.solution() == Some(s.name()) && t.workload().uuid() == w.uuid());
            of.last().and_then(|t| t.passed()).map(|(_, p)| p.latency_ms)
        };
        let axes: Vec<String> = w.axes().iter().map(|(n, v)| format!("{n}={v}")).collect();
        let show = |ms: Option<f64>| ms.map_or("–".into(), |ms| format!("{ms:.4}"));
        let (p, q) = (ms(a), ms(b));
        let ratio = p.zip(q).map_or("–".into(), |(p, q)| format!("{:.3}", p / q));
        let _ = write!(
            body,
            "<tr><td>{}<td class=n>{}<td class=n>{}<td class=n>{ratio}</tr>",
            escaped(&axes.join(" ")),
            show(p),
            show(q)
        );
    }
    page("Two solutions", &(body + "</table>"))
}
