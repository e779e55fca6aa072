//! As much of Python's grammar as a file can be refused by without Python: strings and brackets that end, and the
//! functions defined at the top. The interpreter has the last word when it builds.

/// Names of the functions defined at the top level, or what is wrong with the text.
pub(crate) fn top_level_functions(source: &str) -> Result<Vec<String>, String> {
    let mut found = Vec::new();
    for (start, line) in logical_lines(source)? {
        let text = &source[start..];
        if line.indent > 0 || !text.starts_with("def ") {
            continue;
        }
        let name: String = text[4..].trim_start().chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect();
        let after = text[4..].trim_start()[name.len()..].trim_start();
        if name.is_empty() || !after.starts_with(['(', '[']) {
            return Err(format!("line {}: `def` is not followed by a name and `(`", line.number));
        }
        found.push(name);
    }
    Ok(found)
}

/// Whether `text` is one expression, as far as brackets and strings tell.
pub(crate) fn is_expression(text: &str) -> Result<(), String> {
    match logical_lines(text.trim())?.as_slice() {
        [_] => Ok(()),
        [] => Err("is empty".into()),
        _ => Err("is more than one line".into()),
    }
}

struct Line {
    number: usize,
    indent: usize,
}

/// Where logical lines begin: brackets, strings and backslashes join physical ones.
fn logical_lines(source: &str) -> Result<Vec<(usize, Line)>, String> {
    let bytes = source.as_bytes();
    let (mut lines, mut open, mut number, mut i) = (Vec::new(), Vec::new(), 1, 0);
    let (mut fresh, mut line_start) = (true, 0);
    while i < bytes.len() {
        let c = bytes[i];
        match c {
            b'\n' => {
                number += 1;
                line_start = i + 1;
                fresh |= open.is_empty();
            }
            b'\\' if bytes.get(i + 1) == Some(&b'\n') => {
                number += 1;
                i += 1;
            }
            b'#' => {
                while i + 1 < bytes.len() && bytes[i + 1] != b'\n' {
                    i += 1;
                }
            }
            b' ' | b'\t' | b'\r' | b'\x0c' => {}
            _ => {
                if std::mem::take(&mut fresh) {
                    lines.push((i, Line { number, indent: i - line_start }));
                }
                match c {
                    b'(' | b'[' | b'{' => open.push((c, number)),
                    b')' | b']' | b'}' => {
                        let want = match c {
                            b')' => b'(',
                            b']' => b'[',
                            _ => b'{',
                        };
                        match open.pop() {
                            Some((got, _)) if got == want => {}
                            _ => return Err(format!("line {number}: `{}` closes nothing", c as char)),
                        }
                    }
                    b'"' | b'\'' => i = string_end(bytes, i, &mut number)?,
                    _ => {}
                }
            }
        }
        i += 1;
    }
    match open.pop() {
        Some((c, at)) => Err(format!("line {at}: `{}` is not closed", c as char)),
        None => Ok(lines),
    }
}

/// Index of the last byte of the string that begins at `i`.
fn string_end(bytes: &[u8], i: usize, number: &mut usize) -> Result<usize, String> {
    let (quote, begin) = (bytes[i], *number);
    let long = bytes[i..].starts_with(&[quote; 3]);
    let mut j = i + if long { 3 } else { 1 };
    while j < bytes.len() {
        match bytes[j] {
            b'\\' => {
                *number += usize::from(bytes.get(j + 1) == Some(&b'\n'));
                j += 1;
            }
            b'\n' if !long => break,
            b'\n' => *number += 1,
            c if c == quote && !long => return Ok(j),
            c if c == quote && bytes[j..].starts_with(&[quote; 3]) => return Ok(j + 2),
            _ => {}
        }
        j += 1;
    }
    Err(format!("line {begin}: a string does not end"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn functions_at_the_top_are_found_and_no_others() {
        let text = "import x\n\n@no_grad()\ndef run(a,\n  b):\n    '''def no(\n'''\n    def inner(): pass\nasync def other(): pass\nf = \"def g(\"\ndef two(x): return x\n";
        assert_eq!(top_level_functions(text), Ok(vec!["run".into(), "two".into()]));
    }

    #[test]
    fn broken_text_is_refused_with_its_line() {
        for (text, want) in [
            ("def run(:\n  x)\n(", "line 3: `(` is not closed"),
            ("x = 'abc\ny'", "line 1: a string does not end"),
            ("\n)", "line 2: `)` closes nothing"),
            ("def (x): pass", "line 1: `def` is not followed by a name and `(`"),
        ] {
            assert_eq!(top_level_functions(text), Err(want.into()), "{text:?}");
        }
        assert!(is_expression("a == b + 1").is_ok());
        assert!(is_expression("a == (b").is_err());
    }
}
