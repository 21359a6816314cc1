// What programs do with the Vercel AI SDK.
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, jsonSchema, streamText, tool } from "ai";

const { SERVER_URL, SERVER_KEY } = process.env;
globalThis.AI_SDK_LOG_WARNINGS = false;
const openai = createOpenAICompatible({
  name: "tinkex", baseURL: `${SERVER_URL}/v1`, apiKey: SERVER_KEY, includeUsage: true, supportsStructuredOutputs: true,
});
const anthropic = createAnthropic({ baseURL: `${SERVER_URL}/anthropic/api/v1`, apiKey: SERVER_KEY });
const found = {};
const asked = { model: openai("hermes"), prompt: "Hello", maxOutputTokens: 8, seed: 5, maxRetries: 0 };

const whole = await generateText(asked);
found.text = whole.text;
found.usage = whole.usage.outputTokens;
const stream = streamText(asked);
found["streamed text"] = "";
for await (const piece of stream.textStream) found["streamed text"] += piece;
found["streamed usage"] = (await stream.usage).outputTokens;
const completed = await generateText({ ...asked, model: openai.completionModel(process.argv[2]) });
found.completion = typeof completed.text;

const parameters = {
  type: "object", properties: { days: { type: "integer", minimum: 0, maximum: 9 } }, required: ["days"],
  additionalProperties: false,
};
const tools = { weather: tool({ description: "The weather.", inputSchema: jsonSchema(parameters) }) };
const called = await generateText({ ...asked, maxOutputTokens: 200, tools, toolChoice: "required" });
found.call = [called.toolCalls[0].toolName, Object.keys(called.toolCalls[0].input)];
const object = await generateObject({ ...asked, maxOutputTokens: 200, schema: jsonSchema(parameters) });
found.object = Object.keys(object.object);

const greedy = { ...asked, seed: undefined, temperature: 0, model: anthropic("hermes") }; // the protocol has no seed
const message = await generateText(greedy);
found.anthropic = message.usage.outputTokens;
const streamed = streamText({ ...greedy, tools, toolChoice: "required", maxOutputTokens: 200 });
found["anthropic call"] = (await streamed.toolCalls)[0].toolName;
try {
  await generateText({ ...asked, model: openai("gpt-4") });
} catch (error) {
  found.error = error.statusCode;
}
console.log(JSON.stringify(found));
