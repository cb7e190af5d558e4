"""Hold the recall model's chat template.

A rendering is only ever appended to: the prompt for an answer, the answer and <|im_end|> are, byte
for byte, the beginning of every later rendering of the same conversation. So nothing is trimmed,
moved or left out, and tool calls are written the way the model writes them.
"""

CHAT_TEMPLATE = r"""
{%- macro text(content) -%}
    {%- if content is string -%}
        {{- content -}}
    {%- elif content is iterable -%}
        {%- for part in content -%}
            {{- part if part is string else (part.text or '') -}}
        {%- endfor -%}
    {%- endif -%}
{%- endmacro -%}
{%- set opens_with_system = messages and messages[0].role in ('system', 'developer') -%}
{%- if tools -%}
    {{- '<|im_start|>system\n' -}}
    {%- if opens_with_system -%}
        {{- text(messages[0].content) + '\n\n' -}}
    {%- endif -%}
    {{- 'Tools, one to a line:\n' -}}
    {%- for tool in tools -%}
        {{- (tool | tojson) + '\n' -}}
    {%- endfor -%}
    {{- '<|im_end|>\n' -}}
{%- endif -%}
{%- for message in messages -%}
    {%- if message.role == 'assistant' -%}
        {{- '<|im_start|>assistant\n' + text(message.content) -}}
        {%- for call in message.tool_calls or [] -%}
            {%- set tool_call = call.function or call -%}
            {{- '' if loop.first else '\n' -}}
            {{- '<tool_call>\n{"name": ' + (tool_call.name | tojson) + ', "arguments": ' -}}
            {%- if tool_call.arguments is string -%}
                {{- tool_call.arguments -}}
            {%- else -%}
                {{- (tool_call.arguments or {}) | tojson -}}
            {%- endif -%}
            {{- '}\n</tool_call>' -}}
        {%- endfor -%}
        {{- '<|im_end|>\n' -}}
    {%- elif message.role in ('system', 'developer') -%}
        {%- if not (tools and loop.first) -%}
            {{- '<|im_start|>system\n' + text(message.content) + '<|im_end|>\n' -}}
        {%- endif -%}
    {%- elif message.role == 'user' -%}
        {{- '<|im_start|>user\n' + text(message.content) + '<|im_end|>\n' -}}
    {%- elif message.role in ('tool', 'function') -%}
        {{- '<|im_start|>tool\n' + text(message.content) + '<|im_end|>\n' -}}
    {%- else -%}
        {{- raise_exception('unknown role ' + (message.role | tojson)) -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|im_start|>assistant\n' -}}
{%- endif -%}
""".strip()
